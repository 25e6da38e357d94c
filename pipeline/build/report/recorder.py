"""When each item was begun and ended, by whom: what a report's timeline is drawn from."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from nxpipe.pipeline.build.events import Begun, Ended, Event, Said

_STEPS: Final = 50  # that are kept of an attempt; who talks more is not telling of steps


@dataclass
class Attempt:
    """Seconds are since the recorder was made. `end` is none of one that was cut short."""

    key: str
    worker: str
    began: float
    over: float | None = None
    end: Ended | None = None
    steps: list[tuple[float, str]] = field(default_factory=list)


class Recorder:
    """Told of the same events as whoever shows them; a second attempt at an item is another entry."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._zero = now()
        self._attempts: list[Attempt] = []
        self._open: dict[str, Attempt] = {}

    @property
    def attempts(self) -> Sequence[Attempt]:
        """In the order in which they began."""
        return self._attempts

    def handle(self, event: Event) -> None:
        at = self._now() - self._zero
        match event:
            case Begun():
                self._open[event.key] = Attempt(event.key, event.worker, at)
                self._attempts.append(self._open[event.key])
            case Said() if event.key in self._open and len(self._open[event.key].steps) < _STEPS:
                self._open[event.key].steps.append((at, event.text))
            case Ended() if event.key in self._open:
                attempt = self._open.pop(event.key)
                attempt.over, attempt.end = at, event
