"""A build as it is watched: a table on a terminal, lines in a log, JSON for programs."""

import os
import sys
import threading
from importlib.util import find_spec
from types import TracebackType
from typing import Protocol, Self

from nxpipe.pipeline.build.events import Event
from nxpipe.pipeline.build.planned import Plan
from nxpipe.pipeline.build.report.lines import JsonLines, Lines, Silence
from nxpipe.pipeline.build.report.standing import Standing
from nxpipe.pipeline.util.console import Console


class Voice(Protocol):
    """One way to show where a build stands."""

    @property
    def every(self) -> float:
        """Seconds after which it has something to say of itself."""
        ...

    def heard(self, event: Event, standing: Standing) -> None: ...

    def beat(self, standing: Standing) -> None: ...

    def close(self) -> None: ...


class Watch:
    """Told of every event, from one thread at a time. A thread of its own keeps the time while nothing happens.

    Nothing is shown before the first event: of a build that has nothing to do there is nothing to watch.
    """

    def __init__(self, standing: Standing, voice: Voice) -> None:
        self._standing = standing
        self._voice = voice
        self._one_at_a_time = threading.Lock()
        self._over = threading.Event()
        self._beats: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def handle(self, event: Event) -> None:
        with self._one_at_a_time:
            self._standing.handle(event)
            self._voice.heard(event, self._standing)
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="build-watch", daemon=True)
            self._beats.start()

    def close(self) -> None:
        """Leave nothing behind but lines of a log. May be called again."""
        if not self._over.is_set():
            self._over.set()
            if self._beats is not None:
                self._beats.join()
            self._voice.close()

    def _beat(self) -> None:
        while not self._over.wait(self._voice.every):
            with self._one_at_a_time:
                self._voice.beat(self._standing)


def watch(console: Console, plan: Plan) -> Watch:
    """As the options of this invocation, and whoever reads its stderr, would have it."""
    return Watch(Standing(plan), _voice(console))


def _voice(console: Console) -> Voice:
    if console.quiet:
        return Silence()
    if console.json:
        return JsonLines(console)
    # A machine that only hands cells to others need not have the libraries that compile, nor rich, which comes along.
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and find_spec("rich"):
        from nxpipe.pipeline.build.report.live_table import LiveTable

        return LiveTable()
    return Lines(console)
