"""What the driver of a build needs of whoever carries its items out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nxpipe.pipeline.build.events import Event
from nxpipe.pipeline.build.item import Item


@dataclass(frozen=True)
class Limits:
    """Of each item; none: as long as it takes, as much as there is."""

    seconds: float | None = None
    memory: int | None = None  # bytes


class Executor(Protocol):
    """Every item that was started ends in exactly one `Ended`, whatever becomes of the process that carried it out."""

    @property
    def name(self) -> str:
        """As in `--executor`."""
        ...

    def takes(self, item: Item) -> bool:
        """Whether it would begin this one now; False is asked again when something has ended."""
        ...

    def start(self, item: Item) -> None: ...

    def events(self, patience: float) -> Sequence[Event]:
        """What has happened since; if nothing has, wait for something, but no longer than this many seconds."""
        ...

    def close(self) -> None:
        """End what runs, at once. What it has committed stays."""
        ...
