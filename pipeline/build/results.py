"""What a run amounted to: every cell that was asked for, and what became of it."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal, TypeAlias

from nxpipe.pipeline.build.events import Ended, Fault
from nxpipe.pipeline.build.planned import Plan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.util.exit_codes import INCOMPLETE, INTERRUPTED, one_code

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
