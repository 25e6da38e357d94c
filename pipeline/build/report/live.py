"""A build as it is watched: a table on a terminal, lines in a log, JSON for programs."""

import os
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from types import TracebackType
from typing import Final, Protocol, Self

from nxpipe.pipeline.build.jobs import Begun, Ended, Event, Said, to_document
from nxpipe.pipeline.build.plan import Plan
from nxpipe.pipeline.build.report.text import duration, plain
from nxpipe.pipeline.build.state import Named, Standing
from nxpipe.pipeline.util.console import Console, human_bytes


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


_SIGN_OF_LIFE: Final = 60.0  # seconds; some CI takes a job for dead that says nothing for ten minutes
_NAMED: Final = 4


class Silence:
    every = _SIGN_OF_LIFE

    def heard(self, event: Event, standing: Standing) -> None: ...

    def beat(self, standing: Standing) -> None: ...

    def close(self) -> None: ...


class Lines:
    """One when a cell begins, one when it ends, one for each artifact, one a minute that names what runs; of a single
    program its steps."""

    every = _SIGN_OF_LIFE

    def __init__(self, console: Console) -> None:
        self._console = console

    def heard(self, event: Event, standing: Standing) -> None:
        named = standing.named(event.key)
        match event:
            case Begun() if named.cell:
                self._say(standing, f"begin   {named.name} on {plain(event.worker)}")
            case Said() if standing.cells == 1:  # of many, steps would only be noise
                self._console.say(f"  {plain(event.text)}")
            case Ended():
                self._say(standing, _end(event, named))

    def beat(self, standing: Standing) -> None:
        if running := list(_running(standing)):
            beside = [f"{len(running) - _NAMED} more"] if len(running) > _NAMED else []
            left = standing.seconds_left()
            rest = f"; about {duration(left)} left" if left else ""
            self._say(standing, f"running {', '.join(running[:_NAMED] + beside)}{rest}")

    def close(self) -> None: ...

    def _say(self, standing: Standing, text: str) -> None:
        width = len(str(standing.cells))
        self._console.say(f"  [{standing.done:{width}}/{standing.cells}] {text}")


class JsonLines:
    """Every event as it crosses processes, with what it is called, the counts and the time that is left."""

    every = _SIGN_OF_LIFE

    def __init__(self, console: Console) -> None:
        self._console = console

    def heard(self, event: Event, standing: Standing) -> None:
        named = standing.named(event.key)
        self._write(to_document(event) | {"title": named.title, "program": named.program}, standing)

    def beat(self, standing: Standing) -> None:
        self._write({"event": "beat", "running": [one.item.name for one in standing.running()]}, standing)

    def close(self) -> None: ...

    def _write(self, document: dict[str, object], standing: Standing) -> None:
        left = standing.seconds_left()
        figures = {"counts": standing.counts(), "seconds_left": None if left is None else round(left, 1)}
        self._console.data_line(document | figures, err=True)


def _end(event: Ended, named: Named) -> str:
    took = f"in {duration(event.seconds)}"
    if event.fault:
        return f"failed  {named.name} {took}: {plain(event.fault.message)}"
    if event.cached:
        return f"found   {named.name}"
    if named.cell is None:
        return f"publish {named.title} {took}"
    return f"built   {named.name} {took}{f', {human_bytes(event.memory)}' if event.memory else ''}"


def _running(standing: Standing) -> Iterator[str]:
    for one in standing.running():
        step = f"{one.step}, " if one.step else ""
        yield f"{one.item.name} ({step}{duration(standing.since(one))})"
