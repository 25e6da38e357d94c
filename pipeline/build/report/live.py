"""Live display of a build on stderr: a table on a terminal, lines in a log, JSON lines for programs."""

import os
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from types import TracebackType
from typing import Final, Protocol, Self

from nxpipe.pipeline.build.jobs import EVENT_WORDS, BuildEvent, JobFinished, JobLog, JobRetry, JobStarted, to_document
from nxpipe.pipeline.build.report.summary import duration
from nxpipe.pipeline.build.state import BuildState, JobName
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import human_bytes, plain

_HEARTBEAT: Final = 60.0  # seconds; some CI ends a job that prints nothing for ten minutes
_NAMED: Final = 4  # running jobs named in a heartbeat


class View(Protocol):
    """A display of a build's state."""

    @property
    def every(self) -> float:
        """Seconds between two beats."""
        ...

    def show(self, event: BuildEvent, state: BuildState) -> None: ...

    def beat(self, state: BuildState) -> None: ...

    def close(self) -> None: ...


class LiveView:
    """Observer of a build's state that drives a view. Its own thread calls the view's beat while no event comes.

    Nothing is shown before the first event: a build with nothing to do has no display.
    """

    def __init__(self, state: BuildState, view: View) -> None:
        self._state = state
        self._view = view
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._state.observers.append(self.handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._state.observers.remove(self.handle)
        self.close()

    def handle(self, event: BuildEvent) -> None:
        """Show an event. The state, whose lock the caller holds, has applied it."""
        self._view.show(event, self._state)
        if self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="build-view", daemon=True)
            self._beats.start()

    def close(self) -> None:
        """Close the view, which leaves only log lines on the terminal. A second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            if self._beats is not None:
                self._beats.join()
            self._view.close()

    def _beat(self) -> None:
        while not self._closed.wait(self._view.every):
            with self._state.lock:
                self._view.beat(self._state)


def live_view(console: Console, state: BuildState) -> LiveView:
    """The view for the command's options and the kind of stderr."""
    return LiveView(state, _view(console))


def _view(console: Console) -> View:
    if console.quiet:
        return QuietView()
    if console.json:
        return JsonView(console)
    # A machine that only submits jobs may lack the libraries that compile, and rich, which comes with them.
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb" and find_spec("rich"):
        from nxpipe.pipeline.build.report.live_table import TableView

        return TableView()
    return LineView(console)


class QuietView:
    every = _HEARTBEAT

    def show(self, event: BuildEvent, state: BuildState) -> None: ...

    def beat(self, state: BuildState) -> None: ...

    def close(self) -> None: ...


class LineView:
    """A line at the start and end of each cell and at the end of each artifact, and a heartbeat that names running
    jobs; also the steps, in a build of one cell."""

    every = _HEARTBEAT

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, event: BuildEvent, state: BuildState) -> None:
        job = state.job_name(event.key)
        match event:
            case JobStarted() if job.cell:
                self._print(state, f"start   {job.name} on {plain(event.worker)}")
            case JobLog() | JobRetry() if state.cells == 1:  # steps of many cells are noise
                self._console.say(f"  {plain(event.text)}")
            case JobFinished():
                self._print(state, _end(event, job))

    def beat(self, state: BuildState) -> None:
        if running := list(_running(state)):
            omitted = [f"{len(running) - _NAMED} more"] if len(running) > _NAMED else []
            seconds = state.seconds_left()
            time_left = f"; about {duration(seconds)} left" if seconds else ""
            self._print(state, f"running {', '.join(running[:_NAMED] + omitted)}{time_left}")

    def close(self) -> None: ...

    def _print(self, state: BuildState, text: str) -> None:
        width = len(str(state.cells))
        self._console.say(f"  [{state.done:{width}}/{state.cells}] {text}")


class JsonView:
    """Each event as a JSON line, with the job's title, the counts and the time that is left."""

    every = _HEARTBEAT

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, event: BuildEvent, state: BuildState) -> None:
        job = state.job_name(event.key)
        self._write(to_document(event) | {"title": job.title, "program": job.program}, state)

    def beat(self, state: BuildState) -> None:
        self._write({"event": "beat", "running": [attempt.job.name for attempt in state.running()]}, state)

    def close(self) -> None: ...

    def _write(self, document: dict[str, object], state: BuildState) -> None:
        seconds = state.seconds_left()
        counts = {EVENT_WORDS[status]: count for status, count in state.counts().items()}
        figures = {"counts": counts, "seconds_left": None if seconds is None else round(seconds, 1)}
        self._console.data_line(document | figures, err=True)


def _end(event: JobFinished, job: JobName) -> str:
    time = f"in {duration(event.seconds)}"
    if event.failure:
        return f"failed  {job.name} {time}: {plain(event.failure.message)}"
    if event.cached:
        return f"cached  {job.name}"
    if job.cell is None:
        return f"publish {job.title} {time}"
    return f"built   {job.name} {time}{f', {human_bytes(event.memory)}' if event.memory else ''}"


def _running(state: BuildState) -> Iterator[str]:
    for attempt in state.running():
        step = f"{attempt.step}, " if attempt.step else ""
        yield f"{attempt.job.name} ({step}{duration(state.elapsed - attempt.began)})"
