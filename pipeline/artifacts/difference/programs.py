"""The same program in two artifacts: how large it is, how fast it is predicted to be, what it was made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.artifacts.difference.graphs import GraphDifference, between, graph_of
from nxpipe.pipeline.compile import utilisation

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Executable, Manifest

# What is compared, and where utilisation.json has it.
FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "predicted_ns": ("time", "latency_ns"),
    "instructions": ("instructions", "static"),
    "carried_out": ("instructions", "carried_out"),
    "code_bytes": ("footprint", "code"),
}


@dataclass(frozen=True)
class ProgramDifference:
    """`figures`: before and after; None where an artifact does not say. `graph` is none where both are equal, or one of
    them is not stored."""

    name: str
    degree: int
    figures: Mapping[str, tuple[float | None, float | None]]
    is_same_graph: bool
    graph: GraphDifference | None

    @property
    def is_empty(self) -> bool:
        return self.is_same_graph and all(before == after for before, after in self.figures.values())

    def document(self) -> dict[str, object]:
        return {
            "program": self.name,
            "tensor_parallel": self.degree,
            **{name: {"a": before, "b": after} for name, (before, after) in self.figures.items()},
            "same_graph": self.is_same_graph,
            "graph": self.graph.document() if self.graph else None,
        }


def program_differences(before: "Manifest", after: "Manifest", store: "Store") -> Iterator[ProgramDifference]:
    """Of the programs that both have: equal ones are of the same phase, batch, bucket and degree."""
    figures = [utilisation.read(manifest, store) for manifest in (before, after)]
    known = {identity(one): one for one in before.executables}
    for new in after.executables:
        if old := known.get(identity(new)):
            told = [figures[side].get(one.name) for side, one in enumerate((old, new))]
            yield ProgramDifference(
                name=new.name,
                degree=new.tensor_parallel,
                figures={name: (number_at(told[0], path), number_at(told[1], path)) for name, path in FIGURES.items()},
                is_same_graph=old.graph_key == new.graph_key,
                graph=_graphs((before, old), (after, new), store) if old.graph_key != new.graph_key else None,
            )


def identity(one: "Executable") -> tuple[str, int, int, int]:
    """What makes two programs of different artifacts the same one."""
    return one.phase, one.batch, one.sequence, one.tensor_parallel


def number_at(figures: Any, path: tuple[str, ...]) -> float | None:
    """They may be a stranger's."""
    for name in path:
        figures = figures.get(name) if isinstance(figures, Mapping) else None
    return figures if isinstance(figures, int | float) and not isinstance(figures, bool) else None


def _graphs(
    before: "tuple[Manifest, Executable]", after: "tuple[Manifest, Executable]", store: "Store"
) -> GraphDifference | None:
    old, new = (graph_of(*side, store) for side in (before, after))
    return between(old, new) if old and new else None
