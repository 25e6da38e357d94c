"""A build in lines: for a log, for a program, for nobody."""

from collections.abc import Iterator
from typing import Final

from nxpipe.pipeline.build.events import Begun, Ended, Event, Said, to_document
from nxpipe.pipeline.build.report.standing import Named, Standing
from nxpipe.pipeline.build.report.words import duration, plain
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import human_bytes

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
