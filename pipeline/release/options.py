"""What a person asks of a release."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

GATES: Final = ("check", "build", "verify", "bench", "sign", "promote", "rollout")


@dataclass(frozen=True)
class ExpectedGeneration:
    """A generation of a channel, by its number and by the digest of all that it says."""

    generation: int
    digest: str

    def __str__(self) -> str:
        return f"{self.generation}@{self.digest}"


@dataclass(frozen=True)
class ReleaseOptions:
    """`source` is the channel whose artifacts are released, without which they are built; `expect` is what it must
    serve then, which is what somebody has approved; `how` says how that is done,
    as `nxpipe build` takes it. `place` are the options, and what was typed for them, that the way back has to
    repeat: the store and the file."""

    channel: str
    source: str | None
    expect: ExpectedGeneration | None
    names: tuple[str, ...]
    threshold: float
    skipped: frozenset[str]
    wait: bool
    actor: str
    reason: str
    key: str | None
    how: Mapping[str, Any]
    place: Mapping[str, str]
