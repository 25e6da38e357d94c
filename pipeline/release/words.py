"""What a person asks of a release."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.pipeline.build.options import BuildOptions

GATES: Final = ("check", "build", "verify", "bench", "sign", "promote", "rollout")


@dataclass(frozen=True)
class Expected:
    """A generation of a channel, by its number and by the digest of all that it says."""

    generation: int
    digest: str

    def __str__(self) -> str:
        return f"{self.generation}@{self.digest}"


@dataclass(frozen=True)
class Words:
    """`source` is the channel whose artifacts are released, without which they are built; `expect` is what it must
    serve then, which is what somebody has approved; `how` says how that is done,
    as `nxpipe build` takes it. `place` are the options, and what was typed for them, that the way back has to
    repeat: the store and the file."""

    channel: str
    source: str | None
    expect: Expected | None
    names: tuple[str, ...]
    threshold: float
    skipped: frozenset[str]
    wait: bool
    actor: str
    reason: str
    key: str | None
    how: BuildOptions
    place: Mapping[str, str]
