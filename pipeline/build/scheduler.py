"""The items of a plan, in the order in which they go: the largest cell first, an artifact as soon as it is whole."""

import heapq
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.documents import written_now
from nxpipe.pipeline.build.estimates import LITTLE, Timings, name_of
from nxpipe.pipeline.build.executors.local import InlineExecutor
from nxpipe.pipeline.build.jobs import Ended, Event, Executor, Item, Limits, Said
from nxpipe.pipeline.build.plan import Plan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.build.state import Results
from nxpipe.pipeline.build.status import Fault
from nxpipe.pipeline.util.errors import PipelineError
from nxpipe.pipeline.util.exit_codes import STORE
from nxpipe.pipeline.util.machine import processors
from nxpipe.pipeline.verify.verify import Thresholds

_BEFORE_ALL_CELLS: Final = 1e30  # an artifact that is whole waits for none


@dataclass
class Agenda:
    """What waits, and what waits for what. A cell that two artifacts have in common is one item."""

    _ready: list[tuple[float, int, Item]] = field(default_factory=list)
    _artifacts: dict[str, Item] = field(default_factory=dict)
    _missing: dict[str, set[str]] = field(default_factory=dict)
    _wanted_by: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _count: int = 0

    @classmethod
    def of(cls, plan: Plan, thresholds: Thresholds, *, force: bool = False, kms_key: str | None = None) -> "Agenda":
        agenda, seen = cls(), set[str]()

        def item(artifact: PlannedArtifact, cell: PlannedCell | None) -> Item:
            return Item(
                key=cell.key if cell else artifact.key,
                title=f"{artifact.title}, {cell.shape.name}" if cell else artifact.title,
                asked=artifact.asked.anywhere(),
                shape=cell.shape if cell else None,
                store=plan.store,
                thresholds=thresholds,
                force=force,
                work=cell.work if cell else _BEFORE_ALL_CELLS,
                memory=artifact.memory,
                kms_key=kms_key,
            )

        for artifact in plan.artifacts:
            if artifact.is_published or artifact.key in agenda._artifacts or not artifact.key:
                continue
            agenda._artifacts[artifact.key] = item(artifact, None)
            missing = [cell for cell in artifact.cells if cell.state != "committed"]
            agenda._missing[artifact.key] = {cell.key for cell in missing}
            for cell in missing:
                agenda._wanted_by[cell.key].append(artifact.key)
                if cell.state == "to do" and cell.key not in seen:
                    seen.add(cell.key)
                    agenda.put(item(artifact, cell))
            agenda._put_if_whole(artifact.key)
        return agenda

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def first(self) -> Item:
        return self._ready[0][2]

    def take(self) -> Item:
        return heapq.heappop(self._ready)[2]

    def put(self, item: Item) -> None:
        self._count += 1
        heapq.heappush(self._ready, (-item.work, self._count, item))

    def made(self, item: Item) -> None:
        """The artifacts that waited for this cell alone can go."""
        for key in self._wanted_by.get(item.key, ()):
            self._missing[key].discard(item.key)
            self._put_if_whole(key)

    def _put_if_whole(self, key: str) -> None:
        if not self._missing[key]:
            self.put(self._artifacts[key])


_PATIENCE: Final = 1.0  # seconds to wait for news
_LONGEST_PAUSE: Final = 60.0  # seconds before another attempt
_CHANCE: Final = random.SystemRandom()

Watch = Callable[[Event], None]


@dataclass(frozen=True)
class Policy:
    """`pause`: seconds before the second attempt, doubled with each; half of it is left to chance."""

    keep_going: bool = False
    retries: int = 2
    pause: float = 1.0


def drive(plan: Plan, agenda: Agenda, executor: Executor, policy: Policy, watch: Watch) -> Results:
    """To the end of the agenda, or of what runs when one is given up. Ctrl-C ends all; what is committed stays."""
    return _Run(plan, agenda, executor, policy, watch).to_the_end()


class _Run:
    def __init__(self, plan: Plan, agenda: Agenda, executor: Executor, policy: Policy, watch: Watch) -> None:
        self._plan = plan
        self._agenda = agenda
        self._executor = executor
        self._policy = policy
        self._watch = watch
        self._running: dict[str, Item] = {}
        self._later: list[tuple[float, Item]] = []
        self._ended: dict[str, Ended] = {}
        self._put_off: set[str] = set()
        self._attempts = Counter[str]()
        self._is_stopped = not policy.keep_going and any(cell.fault for _, cell in plan.cells())

    def to_the_end(self) -> Results:
        began_at, began, interrupted = written_now(), time.monotonic(), False
        try:
            while self._begin_what_is_next():
                for event in self._executor.events(self._patience()):
                    self._hear(event)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            left_behind = self._close()
        return Results(
            plan=self._plan,
            ended=self._ended,
            put_off=self._put_off,
            attempts=self._attempts,
            began_at=began_at,
            seconds=time.monotonic() - began,
            executor=self._executor.name,
            interrupted=interrupted,
            left_behind=left_behind,
        )

    def _close(self) -> str:
        """What could not be ended, in a sentence: it says less about the build than the build's own end."""
        try:
            self._executor.close()
        except PipelineError as error:
            return str(error)
        return ""

    def _begin_what_is_next(self) -> bool:
        """False: nothing runs, and nothing is left to begin."""
        now = time.monotonic()
        for due in [pair for pair in self._later if pair[0] <= now]:
            self._later.remove(due)
            self._agenda.put(due[1])
        while self._agenda and not self._is_stopped and self._executor.takes(self._agenda.first):
            item = self._agenda.take()
            self._running[item.key] = item
            self._attempts[item.key] += 1
            self._executor.start(item)
        return bool(self._running) or (not self._is_stopped and bool(self._agenda or self._later))

    def _patience(self) -> float:
        due = min((moment for moment, _ in self._later), default=float("inf"))
        return min(max(due - time.monotonic(), 0.01), _PATIENCE)

    def _hear(self, event: Event) -> None:
        if not isinstance(event, Ended):
            self._watch(event)
            return
        item = self._running.pop(event.key)
        event = replace(event, seconds=round(event.seconds, 3))
        self._ended[event.key] = event
        self._put_off.discard(event.key)
        if event.fault is None:
            self._watch(event)
            self._agenda.made(item)
        elif event.fault.sort == "environmental" and self._attempts[item.key] <= self._policy.retries:
            self._try_again(item, event.fault)
        else:
            self._watch(event)
            self._is_stopped |= not self._policy.keep_going or _is_everybodys(event.fault)

    def _try_again(self, item: Item, fault: Fault) -> None:
        self._put_off.add(item.key)
        pause = min(self._policy.pause * 2 ** (self._attempts[item.key] - 1), _LONGEST_PAUSE)
        pause *= 0.5 + _CHANCE.random() / 2
        self._watch(Said(item.key, f"tried again in {pause:.0f} s: {fault.message}"))
        self._later.append((time.monotonic() + pause, item))


def _is_everybodys(fault: Fault) -> bool:
    """No other item would fare better: something of this machine, or the store, which is where all of them meet."""
    return fault.sort == "here" or fault.code == STORE.number


@dataclass(frozen=True)
class Means:
    """Who carries items out, and within which limits. `project` and `region` say where the build farm is."""

    executor: str
    limits: Limits
    jobs: int | None
    address: str | None
    project: str
    region: str | None


def execute(
    plan: Plan, store: Store, agenda: Agenda, means: Means, policy: Policy, watch: Callable[[Event], None]
) -> Results:
    """Where nothing is left to do, no cluster is started for it."""
    executor = _executor(plan, store, means, watch) if agenda else InlineExecutor(watch)
    return drive(plan, agenda, executor, policy, watch)


def note_timings(results: Results, timings: Timings) -> None:
    """What was made, for the estimates of the next plan."""
    built = [one for one in results.cells() if one.fate == "built" and one.seconds]
    timings.note({name_of(one.artifact.asked.request(), one.cell.shape): (one.cell.work, one.seconds) for one in built})


def _executor(plan: Plan, store: Store, means: Means, watch: Callable[[Event], None]) -> Executor:
    if means.executor == "ray":
        from nxpipe.pipeline.build.executors.ray import RayExecutor

        return RayExecutor(means.address, means.limits, means.jobs)
    if means.executor == "batch":
        from nxpipe.pipeline.build.executors.batch import BatchExecutor, find_farm

        return BatchExecutor(store, find_farm(means.project, means.region), means.limits)
    to_do = [cell.work for _, cell in plan.cells() if cell.state == "to do"]
    if means.limits == Limits() and (len(to_do) <= 1 or (means.jobs is None and sum(to_do) <= LITTLE)):
        return InlineExecutor(watch)
    from nxpipe.pipeline.build.executors.local import LocalExecutor

    return LocalExecutor(means.jobs or max(min(processors(), len(to_do)), 1), means.limits)
