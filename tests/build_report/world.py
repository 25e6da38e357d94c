"""Plans, events and results of invented builds."""

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from nxpipe.pipeline.build.jobs import (
    BuildEvent,
    CellStatus,
    Event,
    Failure,
    FailureClass,
    JobFinished,
    JobLog,
    JobRetry,
    JobStarted,
    JobSubmitted,
)
from nxpipe.pipeline.build.plan import BuildPlan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.build.state import BuildState, Results
from nxpipe.pipeline.models.configuration import Shape, shapes_of
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.weights import WeightsSource

BEGAN = "2026-11-21T19:01:47.250000Z"
TOO_LARGE = Failure(
    FailureClass.DETERMINISTIC, "DoesNotFit", "it needs 19.2 GB and a core holds 16 GB; pass --tp 4", 13, "a log"
)
NO_SPACE = Failure(FailureClass.RETRYABLE, "OSError", "no space left on the disk; free some", 30)


def key_of(*words: object) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()


def shape(bucket: int = 128, batch: int = 1, phase: str = "forward") -> Shape:
    return Shape(phase, batch, bucket)


def cell(title: str, one: Shape, status: CellStatus = CellStatus.QUEUED, **more: object) -> PlannedCell:
    known: dict[str, object] = {"work": float(one.batch * one.sequence)}
    return replace(PlannedCell(key_of(title, one), one, status), **(known | more))  # type: ignore[arg-type]


def artifact(title: str, *cells: PlannedCell, tp: int = 1) -> PlannedArtifact:
    seed = WeightsSource.parse("random:0")
    spec = ModelSpec(title, None, None, "inf2.xlarge", tp, None, (1,), None, "matmult", "bf16", seed)
    return PlannedArtifact(key_of(title, "artifact"), title, spec, cells)


def plan(*artifacts: PlannedArtifact) -> BuildPlan:
    return BuildPlan("file://.nxpipe/store", artifacts)


def matrix(
    models: int, batches: Iterable[int], buckets: Iterable[int], status: CellStatus = CellStatus.QUEUED
) -> BuildPlan:
    shapes = shapes_of(("forward",), list(batches), list(buckets))
    titles = [f"acme/model-{number}" for number in range(models)]
    return plan(*(artifact(title, *(cell(title, entry, status) for entry in shapes)) for title in titles))


def results(
    of: BuildPlan,
    finished: Iterable[JobFinished] = (),
    *,
    attempts: Mapping[str, int] | None = None,
    interrupted: bool = False,
    retrying: Set[str] = frozenset(),
) -> Results:
    """A build whose jobs have these results, each in its first attempt unless `attempts` differs."""
    state = BuildState(of, Clock())
    for end in finished:
        for _ in range((attempts or {}).get(end.key, 1)):
            state.apply(JobSubmitted(end.key))
        state.apply(JobRetry(end.key, "retry", end) if end.key in retrying else end)
    return over(state, interrupted=interrupted)


def after(of: BuildPlan, events: Iterable[BuildEvent | JobSubmitted], seconds: float = 1.0) -> BuildState:
    """The events, each with this delay after the one before."""
    clock = Clock()
    state = BuildState(of, clock)
    for event in events:
        clock.time += seconds
        state.apply(event)
    return state


def over(state: BuildState, *, interrupted: bool = False) -> Results:
    return Results(state, BEGAN, 83.5, "local", interrupted)


def course(of: BuildPlan, worker: str = "local-1", failures: Mapping[str, Failure] | None = None) -> list[Event]:
    """The events of a sequential build: every pending cell, then the complete artifacts."""
    events: list[Event] = []
    failed = failures or {}
    for entry in of.artifacts:
        for item in entry.cells:
            if item.status is CellStatus.QUEUED:
                events += [JobStarted(item.key, worker), JobLog(item.key, "compile")]
                events.append(JobFinished(item.key, 2.0, memory=3_000_000, failure=failed.get(item.key)))
        if not any(item.key in failed for item in entry.cells):
            events += [JobStarted(entry.key, worker), JobFinished(entry.key, 0.5)]
    return events


def ends(events: Iterable[Event]) -> list[JobFinished]:
    return [event for event in events if isinstance(event, JobFinished)]


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time
