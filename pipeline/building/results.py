"""What a run amounted to: every cell that was asked for, and what became of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pipeline.building.events import Ended, Fault
from pipeline.building.planned import Plan, PlannedArtifact, PlannedCell
from pipeline.exit_codes import INCOMPLETE, INTERRUPTED, OK

# `found`: the store had it; `built`: this run made it; all else is missing.
Fate: TypeAlias = Literal["found", "built", "failed", "not tried"]


@dataclass(frozen=True)
class CellResult:
    """`fault` is the cell's own, or that of publishing the artifact that it is part of."""

    artifact: PlannedArtifact
    cell: PlannedCell
    fate: Fate
    attempts: int
    seconds: float
    memory: int
    fault: Fault | None


@dataclass(frozen=True)
class Results:
    """`ended`: the last end of every item by its key. `interrupted`: by a person. `left_behind`: what could not
    be ended of what the executor had begun."""

    plan: Plan
    ended: Mapping[str, Ended]
    attempts: Mapping[str, int]
    began_at: str
    seconds: float
    executor: str
    interrupted: bool = False
    left_behind: str = ""

    def cells(self) -> list[CellResult]:
        return [self._cell(artifact, cell) for artifact, cell in self.plan.cells()]

    def missing(self) -> list[CellResult]:
        return [one for one in self.cells() if one.fate in ("failed", "not tried")]

    def counts(self) -> Mapping[Fate, int]:
        return Counter(one.fate for one in self.cells())

    @property
    def exit_code(self) -> int:
        """0 only when every cell is in a published artifact."""
        if self.interrupted:
            return INTERRUPTED.number
        missing = self.missing()
        codes = {one.fault.code if one.fault else INCOMPLETE.number for one in missing}
        return OK.number if not missing else codes.pop() if len(codes) == 1 else INCOMPLETE.number

    def _cell(self, artifact: PlannedArtifact, cell: PlannedCell) -> CellResult:
        own, publishing = self.ended.get(cell.key), self.ended.get(artifact.key)
        published = artifact.is_published or (publishing is not None and publishing.fault is None)
        fault = next((end.fault for end in (own, publishing) if end is not None and end.fault is not None), cell.fault)
        made = own is not None and own.fault is None and not own.cached
        fate: Fate = ("built" if made else "found") if published else "failed" if fault else "not tried"
        return CellResult(
            artifact=artifact,
            cell=cell,
            fate=fate,
            attempts=self.attempts.get(cell.key, 0),
            seconds=own.seconds if own else 0.0,
            memory=own.memory if own else 0,
            fault=None if published else fault,
        )
