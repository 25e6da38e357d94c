"""Where a build stands at any moment: made of its plan, moved by events. Whoever shows it only reads it."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from nxpipe.pipeline.build.events import Begun, Ended, Event, Said
from nxpipe.pipeline.build.planned import Plan, PlannedCell, State
from nxpipe.pipeline.build.report.estimates import Estimates
from nxpipe.pipeline.build.report.words import plain

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
