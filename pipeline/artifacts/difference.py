"""What a program's graph has that another one has not."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.weights import read_weights
from nxpipe.pipeline.compile import artifact_files, utilisation

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Executable, Manifest, Tensor
    from nxpipe.emulator.ir.graph import Graph


@dataclass(frozen=True)
class GraphDifference:
    """Nodes are counted as often as they run. `added` and `removed` are kinds of work with the type of what comes of it
    and the module that it is from."""

    operators: Mapping[str, tuple[int, int]]  # all that either has: before, after
    constants: tuple[int, int]
    added: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)

    @property
    def nodes(self) -> tuple[int, int]:
        before, after = zip(*self.operators.values(), strict=True) if self.operators else ((), ())
        return sum(before), sum(after)

    def document(self) -> dict[str, object]:
        return {
            "nodes": _sides(self.nodes),
            "constants": _sides(self.constants),
            "operators": {name: _sides(counts) for name, counts in self.operators.items()},
            "added": dict(sorted(self.added.items())),
            "removed": dict(sorted(self.removed.items())),
        }


def graph_difference(before: "Graph", after: "Graph") -> GraphDifference:
    old, new = (_kinds(graph) for graph in (before, after))
    labels = [Counter[str](), Counter[str]()]
    for found, kinds in zip(labels, (old, new), strict=True):
        for (label, _), count in kinds.items():
            found[label] += count
    names = sorted(labels[0].keys() | labels[1].keys())
    return GraphDifference(
        operators={name: (labels[0][name], labels[1][name]) for name in names},
        constants=(len(before.constants), len(after.constants)),
        added=Counter({f"{label} {rest}": count for (label, rest), count in (new - old).items()}),
        removed=Counter({f"{label} {rest}": count for (label, rest), count in (old - new).items()}),
    )


def graph_of(manifest: "Manifest", executable: "Executable", store: "Store") -> "Graph | None":
    """None where the artifact holds none, as those of AWS's compiler."""
    from nxpipe.emulator.ir.graph import Graph

    wanted = artifact_files.graph(executable.name)
    blob = next((file.blob for file in manifest.files if file.path == wanted), None)
    return None if blob is None else Graph.from_bytes(store.read_blob(blob))


def _kinds(graph: "Graph") -> Counter[tuple[str, str]]:
    """Nodes by their work, the type of what comes of it, and the module."""
    found = Counter[tuple[str, str]]()
    for number, times in enumerate(_times(graph)):
        node = graph.nodes[number]
        where = f" at {node.origin.module}" if node.origin.module else ""
        found[node.op.label, f"{node.result.type}{where}"] += times
    return found


def _times(graph: "Graph") -> Iterator[int]:
    """How often each node runs."""
    counts = {number: repeat.count for repeat in graph.repeats for number in range(repeat.start, repeat.stop)}
    return (counts.get(number, 1) for number in range(len(graph.nodes)))


def _sides(pair: tuple[int, int]) -> dict[str, int]:
    return {"a": pair[0], "b": pair[1]}


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
    return graph_difference(old, new) if old and new else None


_AT_ONCE: Final = 1 << 20  # elements that are compared together


@dataclass(frozen=True)
class TensorChange:
    """`largest` is the largest difference of two elements by the largest element before; `why` there is none."""

    name: str
    largest: float | None
    why: str = ""

    def document(self) -> dict[str, object]:
        return asdict(self)


def tensor_changes(
    before: "Manifest", after: "Manifest", names: Sequence[str], store: "Store"
) -> Iterator[TensorChange]:
    """Of tensors that both have; one of each side is in memory at a time, and the packs of small ones."""
    known = [{tensor.name: tensor for tensor in side.weights} for side in (before, after)]
    reading = (read_weights(store.blobs, [tensors[name] for name in names]) for tensors in known)
    for (old, old_bytes), (new, new_bytes) in zip(*reading, strict=True):
        if old.shape != new.shape or not {old.dtype, new.dtype} <= _known_types():
            yield TensorChange(new.name, None, f"{_type(old)} became {_type(new)}")
        else:
            yield _change(new.name, _elements(old, old_bytes), _elements(new, new_bytes))


def _change(name: str, old: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]") -> TensorChange:
    import numpy as np

    size = distance = 0.0
    for start in range(0, len(old), _AT_ONCE):
        one, other = (side[start : start + _AT_ONCE].astype(np.float64) for side in (old, new))
        if not (np.isfinite(one).all() and np.isfinite(other).all()):
            return TensorChange(name, None, "some elements are not finite")
        size, distance = max(size, float(abs(one).max())), max(distance, float(abs(other - one).max()))
    if not size:
        return TensorChange(name, None, "all elements were 0")
    return TensorChange(name, distance / size)


def _elements(tensor: "Tensor", data: bytes | memoryview) -> "np.ndarray[Any, Any]":
    import numpy as np

    from nxpipe.emulator.ir.types import DType

    return np.frombuffer(data, DType(tensor.dtype).stored)


def _known_types() -> set[str]:
    from nxpipe.emulator.ir.types import DType

    return {str(dtype) for dtype in DType}


def _type(tensor: "Tensor") -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
