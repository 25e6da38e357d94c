"""The rules as a plugin of CDK's validation: a finding fails the synthesis and stands in CDK's own report.

Other packs are asked by it rather than beside it, so that one list of acknowledgements holds for all, and one that
nothing needs is noticed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

import aws_cdk as cdk
import jsii

from nxpipe.stacks.reading import Resource, Template, Templates, construct_paths, read
from nxpipe.stacks.rules import RULES, Facts, Finding, lint
from nxpipe.stacks.rules.acceptance import Accepted, sift

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
