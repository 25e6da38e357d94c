"""Plans, events and ends of builds that never happened."""

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace

from nxpipe.pipeline.build.events import Begun, Ended, Event, Fault, Said
from nxpipe.pipeline.build.planned import Plan, PlannedArtifact, PlannedCell, State
from nxpipe.pipeline.build.results import Results
from nxpipe.pipeline.models.shapes import Shape, shapes_of
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.weights import WeightsSource

BEGAN = "2026-11-21T19:01:47.250000Z"
TOO_LARGE = Fault("deterministic", "DoesNotFit", "it needs 19.2 GB and a core holds 16 GB; pass --tp 4", 13, "a log")
NO_SPACE = Fault("environmental", "OSError", "no space left on the disk; free some", 30)


def key_of(*words: object) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()


def shape(bucket: int = 128, batch: int = 1, phase: str = "forward") -> Shape:
    return Shape(phase, batch, bucket)


def cell(title: str, one: Shape, state: State = "to do", **more: object) -> PlannedCell:
    known: dict[str, object] = {"work": float(one.batch * one.sequence)}
    return replace(PlannedCell(key_of(title, one), one, state), **(known | more))  # type: ignore[arg-type]


def artifact(title: str, *cells: PlannedCell, tp: int = 1) -> PlannedArtifact:
    seed = WeightsSource.parse("random:0")
    spec = ModelSpec(title, None, None, "inf2.xlarge", tp, None, (1,), None, "matmult", "bf16", seed)
    return PlannedArtifact(key_of(title, "artifact"), title, spec, cells)


def plan(*artifacts: PlannedArtifact) -> Plan:
    return Plan("file://.nxpipe/store", artifacts)


def matrix(models: int, batches: Iterable[int], buckets: Iterable[int], state: State = "to do") -> Plan:
    shapes = shapes_of(("forward",), list(batches), list(buckets))
    titles = [f"acme/model-{number}" for number in range(models)]
    return plan(*(artifact(title, *(cell(title, one, state) for one in shapes)) for title in titles))


def results(
    of: Plan,
    ended: Iterable[Ended] = (),
    *,
    attempts: Mapping[str, int] | None = None,
    interrupted: bool = False,
    put_off: Set[str] = frozenset(),
) -> Results:
    by_key = {one.key: one for one in ended}
    return Results(of, by_key, attempts or dict.fromkeys(by_key, 1), BEGAN, 83.5, "local", interrupted, put_off)


def course(of: Plan, worker: str = "local-1", faults: Mapping[str, Fault] | None = None) -> list[Event]:
    """One after another: every cell that is to do, then the artifacts that are whole."""
    events: list[Event] = []
    failed = faults or {}
    for each in of.artifacts:
        for one in each.cells:
            if one.state == "to do":
                events += [Begun(one.key, worker), Said(one.key, "compile")]
                events.append(Ended(one.key, 2.0, memory=3_000_000, fault=failed.get(one.key)))
        if not any(one.key in failed for one in each.cells):
            events += [Begun(each.key, worker), Ended(each.key, 0.5)]
    return events


def ends(events: Iterable[Event]) -> list[Ended]:
    return [event for event in events if isinstance(event, Ended)]


class Clock:
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time
