"""What a plan says, as data: every cell that is asked for, and what stands of it. `plan.py` makes it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from nxpipe.pipeline.build.asked import Asked
from nxpipe.pipeline.build.events import Fault
from nxpipe.pipeline.request import Shape
from nxpipe.pipeline.util.exit_codes import one_code

# docs/reference/building.md, section 3.
State: TypeAlias = Literal["published", "committed", "to do", "failed", "refused"]


@dataclass(frozen=True)
class PlannedCell:
    """`why` is the reason of a miss; `fault` what stands in the way of one that is not to be tried. `work` is its size
    beside other cells; `seconds` an estimate, of what is to be done and was done alike before."""

    key: str
    shape: Shape
    state: State
    why: str = ""
    work: float = 0.0
    seconds: float | None = None
    fault: Fault | None = None


@dataclass(frozen=True)
class PlannedArtifact:
    """`key` is the request key, "" for what cannot be asked: its cells say why. `title` is what a person calls it."""

    key: str
    title: str
    asked: Asked
    cells: tuple[PlannedCell, ...]
    memory: int = 0  # bytes that a worker on one of them may take

    @property
    def is_published(self) -> bool:
        return all(cell.state == "published" for cell in self.cells)


@dataclass(frozen=True)
class Plan:
    store: str
    artifacts: tuple[PlannedArtifact, ...]

    def cells(self) -> Iterator[tuple[PlannedArtifact, PlannedCell]]:
        for artifact in self.artifacts:
            for cell in artifact.cells:
                yield artifact, cell

    @property
    def exit_code(self) -> int:
        """Of a dry run: what cannot be done is not well."""
        return one_code(cell.fault.code for _, cell in self.cells() if cell.fault)

    def document(self) -> dict[str, Any]:
        return asdict(self)
