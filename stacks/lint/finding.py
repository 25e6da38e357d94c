"""Lint findings and rules: what a rule reports, what it may read, and which findings a project accepts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from typing import Final

from nxpipe.pipeline.config.prices import Prices
from nxpipe.stacks.lint.template import Resource, Templates


@dataclass(frozen=True)
class Finding:
    """One violation of one rule: place, fault, remedy."""

    rule: str
    resource: Resource
    place: str  # the property, as "LaunchTemplateData/NetworkInterfaces"
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.rule} {self.resource.path} ({self.resource.type}, {self.place}): {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Window:
    """The start of a capacity block, and the time by which its instances must be drained."""

    start: datetime
    drained: datetime


@dataclass(frozen=True)
class KnownImage:
    region: str
    expires: date | None  # None: its owner set no date
    root_device: str | None = None  # None: not in the lock file
    root_gib: int | None = None


@dataclass(frozen=True)
class Facts:
    """Facts beyond the templates. A rule skips checks whose fact is None."""

    today: date = field(default_factory=lambda: datetime.now(UTC).date())
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    project: str | None = None  # name of the project that the stacks belong to
    blocks: Mapping[str, Window] = field(default_factory=dict)  # by reservation
    images: Mapping[str, KnownImage] | None = None  # the lock file, by AMI
    given_images: frozenset[str] = frozenset()  # AMIs that the configuration names
    unlocked_images: frozenset[str] = frozenset()  # SSM references in place of AMIs; synthesis warns of them
    budget: int | None = None  # US dollars a month
    prices: Prices | None = None


@dataclass(frozen=True)
class Rule:
    """One rule of the pack: its id, its requirement, and the function that finds violations."""

    id: str
    requirement: str
    check: Callable[[Templates, Facts], Iterator[Finding]]


IDLE: Final = "NXP-ACK-1"
EXPIRED: Final = "NXP-ACK-2"


@dataclass(frozen=True)
class Accepted:
    """An acknowledgement: a rule, the resources for which its findings are accepted, and the reason."""

    rule: str
    resource: str  # a pattern of the construct path, the logical id, or STACK/LOGICAL_ID
    reason: str
    expires: date | None = None  # None for those in this package
    optional: bool = False  # True for those in this package: no finding if they are unused

    def covers(self, finding: Finding) -> bool:
        at = finding.resource
        names = (at.path, at.id, f"{at.stack}/{at.id}")
        return self.rule == finding.rule and any(fnmatchcase(name, self.resource) for name in names)


def sift(findings: Iterable[Finding], accepted: Sequence[Accepted], today: date) -> list[Finding]:
    """Findings that no acknowledgement covers, and findings about unused or expired acknowledgements."""
    all_findings = list(findings)
    in_force = [entry for entry in accepted if entry.expires is None or entry.expires > today]
    remaining = [finding for finding in all_findings if not any(entry.covers(finding) for entry in in_force)]
    for entry in accepted:
        used = any(entry.covers(finding) for finding in all_findings)
        if not used and not entry.optional:
            what = f"no finding needs the acknowledgement of {entry.rule} for {entry.resource}"
            remaining.append(_of_acknowledgement(entry, IDLE, what, "remove it"))
        elif used and entry not in in_force:
            what = f"the acknowledgement of {entry.rule} for {entry.resource} expired on {entry.expires}"
            remedy = "fix the finding, or review the reason and set a new date"
            remaining.append(_of_acknowledgement(entry, EXPIRED, what, remedy))
    return remaining


def _of_acknowledgement(accepted: Accepted, rule: str, what: str, remedy: str) -> Finding:
    table = Resource("", None, accepted.rule, "[[acknowledge]]", "nxpipe.toml", {})
    return Finding(rule, table, accepted.rule, what, remedy)
