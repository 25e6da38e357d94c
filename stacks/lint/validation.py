"""CDK validation plugin: NXP rules and cdk-nag packs run at synthesis; accepted findings with their reasons.

Accepted findings of cdk-nag that hold for every project stand here with their reasons; those of one project in its
nxpipe.toml.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import aws_cdk as cdk
import jsii
from aws_cdk import App, Validations
from cdk_nag import AwsSolutionsChecks, NIST80053R5Checks

from nxpipe.pipeline.config import Config
from nxpipe.stacks.lint.costs import estimate, load_prices
from nxpipe.stacks.lint.finding import Accepted, Facts, Finding, sift
from nxpipe.stacks.lint.rules import RULES, accepted_by, facts_of, lint
from nxpipe.stacks.lint.template import Resource, Template, Templates, construct_paths, read

_NIST: Final = "NIST.800.53.R5-"
_SOLUTIONS: Final = "AwsSolutions-"
_CHECKOV: Final = "CKV_AWS_"  # judged by `make audit`

# Pack and rule, where, why.
_DECISIONS: Final = (
    (_CHECKOV, "115", "*-rollout-*/JudgeFunction*", "one machine calls it, once at a time"),
    (_CHECKOV, "116", "*-rollout-*/JudgeFunction*", "whoever calls it waits for the answer, and tries again himself"),
    (_CHECKOV, "117", "*-rollout-*/JudgeFunction*", "it calls nobody; inside of a network it could"),
    (_CHECKOV, "119", "*-rollout-*/Record*", "which version has which weight: no secret, and AWS's own key is on it"),
    (_CHECKOV, "158", "*", "addresses and progress: no secrets, and CloudWatch's key is on them"),
    (_CHECKOV, "18", "*-storage/Logs*", "it is where access logs go; its own would never end"),
    (_SOLUTIONS, "AS3", "*-serve-*", "groups change by rollouts and schedules, and alarms tell of what goes wrong"),
    (_SOLUTIONS, "EC26", "*-serve-*", "the pack cannot follow the launch template, whose volumes are encrypted"),
    (_SOLUTIONS, "EKS1", "*-cluster/Cluster", "listed addresses reach the API, and NXP-NET-1 refuses a list of all"),
    (_SOLUTIONS, "IAM4", "*-cluster/*", "what EKS, its nodes and its network call changes: AWS keeps their policies"),
    (_SOLUTIONS, "IAM4", "*/InstanceRole/Resource", "the agent of ECS changes what it calls: AWS keeps its policy"),
    (_SOLUTIONS, "IAM5", "*-build-farm/Submitting/Resource", "reads without ARNs; ends jobs of the project's tag"),
    (_SOLUTIONS, "IAM5", "*-cluster/Artifacts/DefaultPolicy/Resource", "objects below one prefix of one bucket"),
    (_SOLUTIONS, "IAM5", "*/Publishing/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-endpoint-*/Role/*", "reads below one prefix, has interfaces in our subnets and one log"),
    (_SOLUTIONS, "IAM5", "*-release/*Policy/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-rollout-*/Roles/*", "reads without ARNs; executions of one machine, one folder"),
    (_SOLUTIONS, "IAM5", "*-serve-*/Role/DefaultPolicy/Resource", "reads below one prefix, answers one group's hooks"),
    (_SOLUTIONS, "IAM5", "*-train-*/JobRole/DefaultPolicy/Resource", "objects below listed prefixes of two buckets"),
    (_SOLUTIONS, "L1", "*-rollout-*/Judge/*", "it changes by decision: what was judged is judged alike"),
    (_SOLUTIONS, "SF1", "*-rollout-*", "histories stay 90 days, evidence longer; logs take writes to *"),
    (_SOLUTIONS, "SF2", "*-rollout-*", "a history has each call with its times, nothing is below"),
    (_NIST, "ALBHttpToHttpsRedirection", "*-serve-*", "NXP-NET-3 asks for TLS: a project accepts that, or has it"),
    (_NIST, "ALBWAFEnabled", "*-serve-*", "the balancer has private addresses and a list of callers"),
    (_NIST, "CloudWatchAlarmAction", "*-endpoint-*", "it takes calls back, and tells through its composite alarm"),
    (_NIST, "CloudWatchAlarmAction", "*-observe/*", "it acts through the composite alarm of its fleet"),
    (_NIST, "CloudWatchAlarmAction", "*-serve-*", "it ends instance refreshes, which watch it by name"),
    (_NIST, "CloudWatchLogGroupEncrypted", "*", "addresses and progress: no secrets, and CloudWatch's key is on them"),
    (_NIST, "DynamoDBInBackupPlan", "*-rollout-*", "one item, which each rollout writes anew from the rule itself"),
    (_NIST, "EC2IMDSv2Enabled", "*-serve-*", "the pack cannot follow the launch template; NXP-HOST-1 does"),
    (_NIST, "EC2RestrictedCommonPorts", "*-network/EfaIn", "collectives take all ports, from the group itself only"),
    (_NIST, "EFSInBackupPlan", "*-cache/*", "a cache: all that it holds is in the artifact bucket"),
    (_NIST, "ELBDeletionProtectionEnabled", "*-serve-*", "it holds nothing, and a destroyed fleet must cost nothing"),
    (_NIST, "ELBv2ACMCertificateRequired", "*-serve-*", "NXP-NET-3 asks for TLS: a project accepts that, or has it"),
    (_NIST, "IAMNoInlinePolicy", "*", "a grant belongs to one role, and goes when the role goes"),
    (_NIST, "LambdaConcurrency", "*-rollout-*/Judge/*", "one machine calls it, once at a time"),
    (_NIST, "LambdaDLQ", "*-rollout-*/Judge/*", "whoever calls it waits for the answer, and tries again himself"),
    (_NIST, "LambdaInsideVPC", "*-rollout-*/Judge/*", "it calls nobody; inside of a network it could"),
    (_NIST, "S3BucketReplicationEnabled", "*-storage/*", "replicas of a store are stores of their own ([store])"),
    (_NIST, "S3BucketReplicationEnabled", "*-train-*/Checkpoints/*", "a job that goes on in its zone reads them there"),
    (_NIST, "S3DefaultEncryptionKMS", "*-storage/Logs/*", "S3 writes access logs by its own key only"),
    (_NIST, "VPCDefaultSecurityGroupClosed", "*-network/*", "it takes a custom resource, and nothing joins the group"),
    (_NIST, "VPCNoUnrestrictedRouteToIGW", "*-network/Vpc/way-out*", "only where [network] asks for it, for NAT alone"),
)

ACKNOWLEDGED: Final = tuple(
    Accepted(f"{pack}{rule}", resource, reason, optional=True) for pack, rule, resource, reason in _DECISIONS
)


VERSION: Final = "1.0.0"  # of the pack, in CDK's report


@jsii.implements(cdk.IPolicyValidationPlugin)
class Guards:
    """Judges all templates of the app together, for a reference may lead from one into another."""

    def __init__(
        self,
        facts: Facts,
        accepted: Sequence[Accepted] = (),
        packs: Sequence[cdk.IPolicyValidationPlugin] = (),
        tell: Callable[[Templates], None] | None = None,
    ) -> None:
        """`tell`: what is to be said of the templates, whatever is found."""
        self._facts, self._accepted, self._packs, self._tell = facts, accepted, packs, tell

    @property
    def name(self) -> str:
        return "nxpipe"

    @property
    def version(self) -> str:
        return VERSION

    @property
    def rule_ids(self) -> list[str]:
        return [rule.id for rule in RULES]

    def validate(self, context: cdk.IPolicyValidationContext) -> cdk.PolicyValidationPluginReport:
        templates = Templates(tuple(map(_template, context.stack_templates)))
        if self._tell is not None:
            self._tell(templates)
        found = list(lint(templates, self._facts))
        for pack in self._packs:
            found += _findings(pack.validate(context), templates)
        left = sift(found, self._accepted, self._facts.today)
        return cdk.PolicyValidationPluginReport(success=not left, violations=list(_violations(left)))


def _template(stack: cdk.PolicyValidationStack) -> Template:
    path = Path(stack.template_path)
    region = stack.region if stack.region and "unknown" not in stack.region else None
    stack_name = path.name.removesuffix(".template.json")
    return read(stack_name, json.loads(path.read_text()), region, construct_paths(path))


def _findings(report: cdk.PolicyValidationPluginReport, templates: Templates) -> Iterator[Finding]:
    """What another pack found, as ours: its ids may say in brackets what exactly was found."""
    by_path = {each.path: each for template in templates.all for each in template.resources.values()}
    for violation in report.violations:
        rule, _, detail = violation.rule_name.partition("[")
        what = f"{violation.description.rstrip('.')}{f' ({detail[:-1]})' if detail else ''}"
        for at in violation.violating_resources:
            path = at.construct_path or at.resource_logical_id or ""
            resource = by_path.get(path) or Resource(path.partition("/")[0], None, path, "", path, {})
            mend = violation.fix or f"mend it, or accept it by an [[acknowledge]] of {rule}"
            yield Finding(rule, resource, "", what, mend)


def _violations(findings: Iterable[Finding]) -> Iterator[cdk.PolicyViolation]:
    """CDK's report has one entry for a rule and a sentence, with all that it is said of."""

    def saying(finding: Finding) -> tuple[str, str, str]:
        return finding.rule, finding.what, finding.mend

    for (rule, what, mend), same in groupby(sorted(findings, key=saying), key=saying):
        yield cdk.PolicyViolation(
            rule_name=rule,
            description=f"{rule}: {what}",
            fix=mend,
            severity="error",
            violating_resources=[
                cdk.PolicyViolatingResource(
                    construct_path=each.resource.path, locations=[f"Properties/{each.place}".rstrip("/")]
                )
                for each in same
            ],
        )


def guard(app: App, config: Config, folder: Path) -> None:
    """From now on a finding fails the synthesis, and each synthesis says on stderr what the templates cost."""
    facts = facts_of(config, folder)
    packs = (AwsSolutionsChecks(app), NIST80053R5Checks(app))

    def tell(templates: Templates) -> None:
        found = estimate(templates, facts.prices or load_prices())
        if found.lines:
            sys.stderr.write(f"{found}\n")

    Validations.of(app).add_plugins(Guards(facts, [*ACKNOWLEDGED, *accepted_by(config)], packs, tell))
