"""Findings that are accepted: each with a reason, for a while, and only as long as there is something to accept."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from typing import Final

from nxpipe.stacks.reading import Resource
from nxpipe.stacks.rules.finding import Finding

IDLE: Final = "NXP-ACK-1"
EXPIRED: Final = "NXP-ACK-2"


@dataclass(frozen=True)
class Accepted:
    """What somebody accepts, of which resources, and why."""

    rule: str
    resource: str  # a pattern of the construct's path, or of the stack and the logical id
    reason: str
    expires: date | None = None  # those of the stacks themselves stand as long as the code does
    optional: bool = False  # those of the stacks themselves idle when a project has no such stack

    def covers(self, finding: Finding) -> bool:
        at = finding.resource
        names = (at.path, at.id, f"{at.stack}/{at.id}")
        return self.rule == finding.rule and any(fnmatchcase(name, self.resource) for name in names)


def sift(findings: Iterable[Finding], accepted: Sequence[Accepted], today: date) -> list[Finding]:
    """What is left of the findings, and what is wrong with the acknowledgements."""
    found = list(findings)
    in_force = [each for each in accepted if each.expires is None or each.expires > today]
    left = [finding for finding in found if not any(each.covers(finding) for each in in_force)]
    for each in accepted:
        used = any(each.covers(finding) for finding in found)
        if not used and not each.optional:
            what = f"nothing needs the acknowledgement of {each.rule} for {each.resource}"
            left.append(_about(each, IDLE, what, "take it away"))
        elif used and each not in in_force:
            what = f"the acknowledgement of {each.rule} for {each.resource} ended on {each.expires}"
            left.append(_about(each, EXPIRED, what, "mend what it accepted, or look at its reason anew"))
    return left


def _about(accepted: Accepted, rule: str, what: str, mend: str) -> Finding:
    table = Resource("", None, accepted.rule, "[[acknowledge]]", "nxpipe.toml", {})
    return Finding(rule, table, accepted.rule, what, mend)
