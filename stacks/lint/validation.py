"""CDK validation plugin: NXP rules and cdk-nag packs run at synthesis; accepted findings with their reasons.

Findings of cdk-nag that every project accepts are listed here; those of one project are in its nxpipe.toml.
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
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.stacks.lint.costs import estimate
from nxpipe.stacks.lint.finding import Accepted, Facts, Finding, sift
from nxpipe.stacks.lint.rules import RULES, accepted_by, facts_of, lint
from nxpipe.stacks.lint.template import Resource, Template, Templates, construct_paths, read

_NIST: Final = "NIST.800.53.R5-"
_SOLUTIONS: Final = "AwsSolutions-"
_CHECKOV: Final = "CKV_AWS_"  # checked by `make audit`

# Pack, rule, resource pattern, reason.
_DECISIONS: Final = (
    (_CHECKOV, "115", "*-rollout-*/JudgeFunction*", "one state machine calls it, without concurrency"),
    (_CHECKOV, "116", "*-rollout-*/JudgeFunction*", "calls are synchronous, and the state machine retries them"),
    (_CHECKOV, "117", "*-rollout-*/JudgeFunction*", "it makes no network calls; in a VPC it could"),
    (_CHECKOV, "119", "*-rollout-*/Record*", "traffic weights of versions: no secrets, and encrypted with AWS's key"),
    (_CHECKOV, "158", "*", "no secrets of nxpipe; what servers write is encrypted with CloudWatch's key"),
    (_CHECKOV, "18", "*-storage/Logs*", "the target of access logs; logging itself would never end"),
    (_SOLUTIONS, "AS3", "*-serve-*", "rollouts and schedules change groups, and alarms report failures"),
    (_SOLUTIONS, "EC26", "*-serve-*", "the pack cannot follow the launch template, whose volumes are encrypted"),
    (_SOLUTIONS, "EKS1", "*-cluster/Cluster", "listed addresses reach the API, and NXP-NET-1 rejects 0.0.0.0/0"),
    (_SOLUTIONS, "ELB2", "*-serve-*/Front/Link/*", "it passes TCP on, and the fleet's load balancer logs accesses"),
    (
        _SOLUTIONS,
        "IAM4",
        "*-cluster/*",
        "nodes and the CNI need new actions over time: AWS maintains their policies",
    ),
    (
        _SOLUTIONS,
        "IAM4",
        "*/InstanceRole/Resource",
        "the ECS agent needs new actions over time: AWS maintains its policy",
    ),
    (
        _SOLUTIONS,
        "IAM5",
        "*-build-farm/Submitting/Resource",
        "reads without ARNs; terminates jobs with the project's tag",
    ),
    (_SOLUTIONS, "IAM5", "*-cluster/Artifacts/DefaultPolicy/Resource", "objects below one prefix of one bucket"),
    (_SOLUTIONS, "IAM5", "*-cluster/ControlRole/*", "reads without ARNs; tags nodes with the project's tag"),
    (_SOLUTIONS, "IAM5", "*/Publishing/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-endpoint-*/Role/*", "reads below one prefix, interfaces in the project's subnets, one log"),
    (_SOLUTIONS, "IAM5", "*-network/FlowRole/*", "lists the names of log groups, which has no ARN"),
    (_SOLUTIONS, "IAM5", "*-prove/InstanceRole/DefaultPolicy/Resource", "denies all logs but one"),
    (_SOLUTIONS, "IAM5", "*-prove/Proving/Resource", "objects below one prefix of one bucket, by listed actions"),
    (
        _SOLUTIONS,
        "IAM5",
        "*-prove/Submitting/Resource",
        "reads without ARNs; terminates jobs with the project's tag; streams of one log",
    ),
    (_SOLUTIONS, "IAM5", "*-release/*Policy/Resource", "objects below one prefix of one bucket, by listed actions"),
    (_SOLUTIONS, "IAM5", "*-probe/Role/*", "Lambda makes interfaces without ARNs; its code is denied all of them"),
    (_SOLUTIONS, "IAM5", "*-rollout-*/Roles/*", "reads without ARNs; executions of one machine, one folder"),
    (
        _SOLUTIONS,
        "IAM5",
        "*-serve-*/Role/DefaultPolicy/Resource",
        "reads below one prefix, completes the hooks of its groups; channels of SSM, if set, have no ARN",
    ),
    (_SOLUTIONS, "IAM5", "*-train-*/InstanceRole/DefaultPolicy/Resource", "channels of SSM, if set, have no ARN"),
    (_SOLUTIONS, "IAM5", "*-train-*/JobRole/DefaultPolicy/Resource", "objects below listed prefixes of two buckets"),
    (_SOLUTIONS, "L1", "*-probe/Function", "it lives for an hour, with the runtime that it is tested with"),
    (_SOLUTIONS, "L1", "*-rollout-*/Judge/*", "its runtime is pinned, so that judgements are reproducible"),
    (_SOLUTIONS, "SF1", "*-rollout-*", "histories stay 90 days, evidence longer; logs need write access to *"),
    (_SOLUTIONS, "SF2", "*-rollout-*", "the history has each call with its times; there are no nested services"),
    (_NIST, "ALBHttpToHttpsRedirection", "*-serve-*", "NXP-NET-3 requires TLS or an acknowledgement of the project"),
    (_NIST, "ALBWAFEnabled", "*-serve-*", "the load balancer has private addresses and a list of clients"),
    (
        _NIST,
        "CloudWatchAlarmAction",
        "*-endpoint-*",
        "it rolls a deployment back, and notifies through its composite alarm",
    ),
    (_NIST, "CloudWatchAlarmAction", "*-observe/*", "it notifies through the composite alarm of its fleet"),
    (_NIST, "CloudWatchAlarmAction", "*-serve-*", "instance refreshes name it and stop on it"),
    (_NIST, "CloudWatchLogGroupEncrypted", "*", "no secrets of nxpipe; encrypted with CloudWatch's key"),
    (_NIST, "DynamoDBInBackupPlan", "*-rollout-*", "one item, which each rollout writes again from the listener rule"),
    (_NIST, "EC2IMDSv2Enabled", "*-serve-*", "the pack cannot follow the launch template; NXP-HOST-1 does"),
    (_NIST, "EC2RestrictedCommonPorts", "*-network/EfaIn", "collectives need all ports, from the group itself only"),
    (_NIST, "EFSInBackupPlan", "*-cache/*", "a cache: the artifact bucket has all of its content"),
    (_NIST, "ELBDeletionProtectionEnabled", "*-serve-*", "it has no data, and a destroyed fleet must cost nothing"),
    (_NIST, "ELBLoggingEnabled", "*-serve-*/Front/Link/*", "it passes TCP on; the fleet's load balancer logs accesses"),
    (_NIST, "ELBv2ACMCertificateRequired", "*-serve-*", "NXP-NET-3 requires TLS or an acknowledgement of the project"),
    (_NIST, "IAMNoInlinePolicy", "*", "a grant belongs to one role, and is deleted with it"),
    (_NIST, "LambdaConcurrency", "*-probe/Function", "one command calls it once; new accounts have nothing to reserve"),
    (_NIST, "LambdaConcurrency", "*-rollout-*/Judge/*", "one state machine calls it, without concurrency"),
    (_NIST, "LambdaDLQ", "*-probe/Function", "the call is synchronous, and its caller sees the error"),
    (_NIST, "LambdaDLQ", "*-rollout-*/Judge/*", "calls are synchronous, and the state machine retries them"),
    (_NIST, "LambdaInsideVPC", "*-rollout-*/Judge/*", "it makes no network calls; in a VPC it could"),
    (_NIST, "S3BucketReplicationEnabled", "*-storage/*", "replicas of a store are separate stores ([store])"),
    (_NIST, "S3BucketReplicationEnabled", "*-train-*/Checkpoints/*", "a resumed job reads them in the same region"),
    (_NIST, "S3DefaultEncryptionKMS", "*-storage/Logs/*", "S3 delivers access logs only with SSE-S3 encryption"),
    (
        _NIST,
        "VPCDefaultSecurityGroupClosed",
        "*-network/*",
        "it needs a custom resource, and no resource uses the group",
    ),
    (
        _NIST,
        "VPCNoUnrestrictedRouteToIGW",
        "*-network/Vpc/way-out*",
        "only if [network] sets it, for NAT gateways only",
    ),
)

ACKNOWLEDGED: Final = tuple(
    Accepted(f"{pack}{rule}", resource, reason, optional=True) for pack, rule, resource, reason in _DECISIONS
)


VERSION: Final = "1.0.0"  # of the pack, in CDK's report


@jsii.implements(cdk.IPolicyValidationPlugin)
class Guards:
    """Validation of all templates of the app together, because they reference one another."""

    def __init__(
        self,
        facts: Facts,
        accepted: Sequence[Accepted] = (),
        packs: Sequence[cdk.IPolicyValidationPlugin] = (),
        report: Callable[[Templates], None] | None = None,
    ) -> None:
        """`report` is called with the templates before the rules run."""
        self._facts, self._accepted, self._packs, self._report = facts, accepted, packs, report

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
        if self._report is not None:
            self._report(templates)
        findings = list(lint(templates, self._facts))
        for pack in self._packs:
            findings += _findings(pack.validate(context), templates)
        remaining = sift(findings, self._accepted, self._facts.today)
        return cdk.PolicyValidationPluginReport(success=not remaining, violations=list(_violations(remaining)))


def _template(stack: cdk.PolicyValidationStack) -> Template:
    path = Path(stack.template_path)
    region = stack.region if stack.region and "unknown" not in stack.region else None
    stack_name = path.name.removesuffix(".template.json")
    return read(stack_name, json.loads(path.read_text()), region, construct_paths(path))


def _findings(report: cdk.PolicyValidationPluginReport, templates: Templates) -> Iterator[Finding]:
    """Findings of another pack, whose rule ids may have a detail in brackets."""
    by_path = {resource.path: resource for template in templates.all for resource in template.resources.values()}
    for violation in report.violations:
        rule, _, detail = violation.rule_name.partition("[")
        what = f"{violation.description.rstrip('.')}{f' ({detail[:-1]})' if detail else ''}"
        for at in violation.violating_resources:
            path = at.construct_path or at.resource_logical_id or ""
            resource = by_path.get(path) or Resource(path.partition("/")[0], None, path, "", path, {})
            remedy = violation.fix or "fix it"
            yield Finding(rule, resource, "", what, remedy)


def _violations(findings: Iterable[Finding]) -> Iterator[cdk.PolicyViolation]:
    """Entries of CDK's report: one per rule and message, with all resources that it applies to."""

    def message(finding: Finding) -> tuple[str, str, str]:
        return finding.rule, finding.what, finding.remedy

    for (rule, what, remedy), group in groupby(sorted(findings, key=message), key=message):
        same = list(group)
        yield cdk.PolicyViolation(
            rule_name=rule,
            description=f"{rule}: {what}",
            fix=f"{remedy}; or accept it in nxpipe.toml: {_acknowledgement(rule, same)}",
            severity="error",
            violating_resources=[
                cdk.PolicyViolatingResource(
                    construct_path=finding.resource.path, locations=[f"Properties/{finding.place}".rstrip("/")]
                )
                for finding in same
            ],
        )


def _acknowledgement(rule: str, findings: Sequence[Finding]) -> str:
    """The table that accepts findings. CDK's own hint names its context, which these rules do not read."""
    paths = {finding.resource.path for finding in findings}
    resource = paths.pop() if len(paths) == 1 else "..."
    return f'[[acknowledge]] rule = "{rule}", resource = "{resource}", reason = "...", expires = YYYY-MM-DD'


def guard(app: App, config: Config, folder: Path) -> None:
    """Add the validation to an app: findings fail the synthesis, and the cost estimate is written to stderr."""
    facts = facts_of(config, folder)
    packs = (AwsSolutionsChecks(app), NIST80053R5Checks(app))

    def report(templates: Templates) -> None:
        costs = estimate(templates, facts.prices or load_prices())
        if costs.lines:
            sys.stderr.write(f"{costs}\n")

    Validations.of(app).add_plugins(Guards(facts, [*ACKNOWLEDGED, *accepted_by(config)], packs, report))
