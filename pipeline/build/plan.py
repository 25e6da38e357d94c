"""Plan of a build as data: every cell of every artifact, and its status in the store. `planner.py` makes it."""

from collections.abc import Iterator
from dataclasses import dataclass

from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.status import CellStatus, Failure
from nxpipe.pipeline.request import Shape
from nxpipe.pipeline.util.exit_codes import one_code


@dataclass(frozen=True)
class PlannedCell:
    """`key` is the cache key of its last step, "" if it is refused. `why` explains a cache miss, `failure` a cell that
    is not built. `work` is its size relative to other cells; `seconds` an estimate from earlier builds."""

    key: str
    shape: Shape
    status: CellStatus
    why: str = ""
    work: float = 0.0
    seconds: float | None = None
    failure: Failure | None = None


@dataclass(frozen=True)
class PlannedArtifact:
    """`key` is the request key, "" if it is refused. `memory`: bytes that a worker on one of its cells may take."""

    key: str
    title: str
    asked: Asked
    cells: tuple[PlannedCell, ...]
    memory: int = 0

    @property
    def is_published(self) -> bool:
        return all(cell.status is CellStatus.PUBLISHED for cell in self.cells)


@dataclass(frozen=True)
class BuildPlan:
    """`store` is a URL."""

    store: str
    artifacts: tuple[PlannedArtifact, ...]

    def cells(self) -> Iterator[tuple[PlannedArtifact, PlannedCell]]:
        for artifact in self.artifacts:
            for cell in artifact.cells:
                yield artifact, cell

    @property
    def exit_code(self) -> int:
        """Of a dry run: not 0 if a cell cannot be built."""
        return one_code(cell.failure.code for _, cell in self.cells() if cell.failure)
