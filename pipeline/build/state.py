"""Where a build stands at any moment: made of its plan, moved by events. Whoever shows it only reads it."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from nxpipe.pipeline.build.estimates import Estimates
from nxpipe.pipeline.build.jobs import Begun, Ended, Event, Said
from nxpipe.pipeline.build.plan import Plan, PlannedArtifact, PlannedCell, State
from nxpipe.pipeline.build.report.text import plain
from nxpipe.pipeline.build.status import Fault
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERRUPTED, one_code

Lot: TypeAlias = Literal["found", "built", "failed", "running", "waiting"]
LOTS: Final[tuple[Lot, ...]] = ("found", "built", "failed", "running", "waiting")
_FAILURES: Final = 3
_AT_FIRST: Final[dict[State, Lot]] = {
    "published": "found",
    "committed": "found",
    "to do": "waiting",
    "failed": "failed",
    "refused": "failed",
}


@dataclass(frozen=True)
class Named:
    """An item of the plan. One without a cell publishes its artifact."""

    title: str
    program: str
    cell: PlannedCell | None

    @property
    def name(self) -> str:
        return f"{self.title}, {self.program}" if self.program else self.title


@dataclass
class Running:
    """An item that somebody carries out."""

    item: Named
    worker: str
    began: float
    step: str = ""


class Standing:
    """A cell that several artifacts ask for is carried out once, and counts for each of them."""

    def __init__(self, plan: Plan, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.began = now()
        self.failures: deque[tuple[Named, str]] = deque(maxlen=_FAILURES)  # the last first, and why
        self._artifacts = [artifact.key for artifact in plan.artifacts]
        self._published = {artifact.key for artifact in plan.artifacts if artifact.is_published}
        self._running: dict[str, Running] = {}
        self._lots: dict[str, Lot] = {}
        self._named: dict[str, Named] = {}
        self._shared: Counter[str] = Counter()
        self._counts: Counter[Lot] = Counter()
        self._estimates = Estimates()
        for artifact, cell in plan.cells():
            lot = self._lots.setdefault(cell.key, _AT_FIRST[cell.state])
            self._shared[cell.key] += 1
            self._counts[lot] += 1
            if cell.key not in self._named and lot == "waiting":
                self._estimates.wait(cell)
            self._named[cell.key] = Named(plain(artifact.title), cell.shape.name, cell)
        for artifact in plan.artifacts:
            self._named[artifact.key] = Named(plain(artifact.title), "publish", None)

    @property
    def artifacts(self) -> int:
        return len(self._artifacts)

    @property
    def published(self) -> int:
        return sum(key in self._published for key in self._artifacts)

    @property
    def cells(self) -> int:
        return self._counts.total()

    @property
    def done(self) -> int:
        """Cells of which nothing more is expected."""
        return self.cells - self._counts["running"] - self._counts["waiting"]

    @property
    def elapsed(self) -> float:
        return self._now() - self.began

    def counts(self) -> dict[Lot, int]:
        return {lot: self._counts[lot] for lot in LOTS}

    def named(self, key: str) -> Named:
        """One that the plan does not know is shown by its key."""
        return self._named.get(key) or Named(key[:12], "", None)

    def running(self) -> Sequence[Running]:
        """The longest first."""
        return sorted(self._running.values(), key=lambda one: one.began)

    def since(self, one: Running) -> float:
        return self._now() - one.began

    def seconds_left(self) -> float | None:
        """None where nothing like what waits was measured, now or before."""
        running = [(one.item.cell, self.since(one)) for one in self._running.values() if one.item.cell]
        return self._estimates.left(running)

    def handle(self, event: Event) -> None:
        match event:
            case Begun():
                self._begin(event)
            case Said() if event.key in self._running:
                self._say(self._running[event.key], event.text)
            case Ended():
                self._end(event)

    def _begin(self, event: Begun) -> None:
        named = self.named(event.key)
        if self._lots.get(event.key) == "waiting" and named.cell:
            self._estimates.take(named.cell)
        self._move(event.key, "running")
        self._running[event.key] = Running(named, plain(event.worker), self._now())

    def _say(self, one: Running, text: str) -> None:
        """Which program it is about stands beside it."""
        one.step = plain(text).removesuffix(f" {one.item.program}")

    def _end(self, event: Ended) -> None:
        named = self.named(event.key)
        if self._lots.get(event.key) == "waiting" and named.cell:  # it never began: nobody could take it
            self._estimates.take(named.cell)
        self._running.pop(event.key, None)
        if event.fault:
            self.failures.appendleft((named, plain(event.fault.message)))
        elif named.cell is None:
            self._published.add(event.key)
        elif not event.cached:
            self._estimates.measured(named.cell, event.seconds)
        self._move(event.key, "failed" if event.fault else "found" if event.cached else "built")

    def _move(self, key: str, lot: Lot) -> None:
        if key in self._lots:
            self._counts[self._lots[key]] -= self._shared[key]
            self._counts[lot] += self._shared[key]
            self._lots[key] = lot


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


# `found`: the store had it; `built`: this run made it; all else is missing. Only what was given up has failed.
Fate: TypeAlias = Literal["found", "built", "failed", "not retried", "not tried"]


@dataclass(frozen=True)
class CellResult:
    """`fault` is the cell's own, or that of publishing the artifact that it is part of; of one that was not retried it
    is what the last attempt met."""

    artifact: PlannedArtifact
    cell: PlannedCell
    fate: Fate
    attempts: int
    seconds: float
    memory: int
    fault: Fault | None

    @property
    def is_missing(self) -> bool:
        return self.fate not in ("found", "built")


@dataclass(frozen=True)
class Results:
    """`ended`: the last end of every item by its key. `put_off`: those to which another attempt was due that did not
    end. `interrupted`: by a person. `left_behind`: what could not be ended of what the executor had begun."""

    plan: Plan
    ended: Mapping[str, Ended]
    attempts: Mapping[str, int]
    began_at: str
    seconds: float
    executor: str
    interrupted: bool = False
    put_off: Set[str] = frozenset()
    left_behind: str = ""

    def cells(self) -> list[CellResult]:
        return [self._cell(artifact, cell) for artifact, cell in self.plan.cells()]

    def missing(self) -> list[CellResult]:
        return [one for one in self.cells() if one.is_missing]

    @property
    def exit_code(self) -> int:
        """0 only when every cell is in a published artifact. What was not retried leaves it to what stopped the run."""
        if self.interrupted:
            return INTERRUPTED.number
        missing = self.missing()
        deciding = [one for one in missing if one.fate != "not retried"] or missing
        return one_code(one.fault.code if one.fault else INCOMPLETE.number for one in deciding)

    def _cell(self, artifact: PlannedArtifact, cell: PlannedCell) -> CellResult:
        own, publishing = self.ended.get(cell.key), self.ended.get(artifact.key)
        published = artifact.is_published or (publishing is not None and publishing.fault is None)
        bad = next((end for end in (own, publishing) if end is not None and end.fault is not None), None)
        fault = bad.fault if bad else cell.fault
        fate: Fate
        if published:
            fate = "built" if own is not None and own.fault is None and not own.cached else "found"
        elif bad is not None and bad.key in self.put_off:
            fate = "not retried"
        else:
            fate = "failed" if fault else "not tried"
        return CellResult(
            artifact=artifact,
            cell=cell,
            fate=fate,
            attempts=self.attempts.get(cell.key, 0),
            seconds=own.seconds if own else 0.0,
            memory=own.memory if own else 0,
            fault=None if published else fault,
        )
