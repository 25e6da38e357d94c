"""Options of a release."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.pipeline.build.jobs import BuildOptions

GATES: Final = ("check", "build", "verify", "bench", "sign", "promote", "rollout")


@dataclass(frozen=True)
class ExpectedGeneration:
    """A generation of a channel by number and digest."""

    generation: int
    digest: str

    def __str__(self) -> str:
        return f"{self.generation}@{self.digest}"


@dataclass(frozen=True)
class ReleaseOptions:
    """Options of `nxpipe release`.

    `source` is the channel to release from; None builds the artifacts. `expect` is the approved generation of the
    source. `how` holds the execution options of `nxpipe build`. `place` holds the store and configuration options of
    the command line, which the undo commands repeat.
    """

    channel: str
    source: str | None
    expect: ExpectedGeneration | None
    names: tuple[str, ...]
    threshold: float
    skipped: frozenset[str]
    wait: bool
    actor: str
    reason: str
    without: tuple[str, ...]  # kinds of evidence
    key: str | None
    how: BuildOptions
    place: Mapping[str, str]
