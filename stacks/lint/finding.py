"""Lint findings and rules: what a rule reports, what it may read, and which findings a project accepts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from typing import Final

from nxpipe.stacks.lint.costs import Prices
from nxpipe.stacks.lint.template import Resource, Templates


@dataclass(frozen=True)
class Finding:
    """One breach of one rule: where, what is wrong, what to do."""

    rule: str
    resource: Resource
    place: str  # the property, as "LaunchTemplateData/NetworkInterfaces"
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.rule} {self.resource.path} ({self.resource.type}, {self.place}): {self.what}; {self.mend}"


@dataclass(frozen=True)
class Window:
    """When a capacity block may be used, drained in time."""

    start: datetime
    drained: datetime


@dataclass(frozen=True)
class KnownImage:
    region: str
    expires: date


@dataclass(frozen=True)
class Facts:
    """What is known beyond the templates. A rule does not judge by what is None."""

    today: date = field(default_factory=lambda: datetime.now(UTC).date())
    project: str | None = None  # whose stacks they are
    blocks: Mapping[str, Window] = field(default_factory=dict)  # by reservation
    images: Mapping[str, KnownImage] | None = None  # the lock file, by AMI
    given_images: frozenset[str] = frozenset()  # AMIs that the configuration names itself
    unlocked_images: frozenset[str] = frozenset()  # references in their place, of which synthesis warns
    budget: int | None = None  # US dollars a month
    prices: Prices | None = None


@dataclass(frozen=True)
class Rule:
    """One rule of the pack: its id, what it says, and the function that finds breaches."""

    id: str
    says: str
    check: Callable[[Templates, Facts], Iterator[Finding]]


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
