"""A rule, what it may know beyond the templates, and what it finds."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime

from nxpipe.stacks.costs import Prices
from nxpipe.stacks.reading import Resource, Templates


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
