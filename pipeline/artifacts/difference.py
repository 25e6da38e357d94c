"""Differences between two artifacts below their digests: programs, graphs, tensors."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.weights import read_weights
from nxpipe.pipeline.compile import artifact_files

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.evidence import Evidence, Timing
    from nxpipe.artifact_store.manifest import Executable, Manifest, Tensor
    from nxpipe.emulator.ir.graph import Graph


@dataclass(frozen=True)
class GraphDifference:
    """Operators of two graphs, counted as often as they run. `added` and `removed` count by operator, result type and
    module."""

    operators: Mapping[str, tuple[int, int]]  # counts before and after, by operator
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
    for counts, kinds in zip(labels, (old, new), strict=True):
        for (label, _), count in kinds.items():
            counts[label] += count
    names = sorted(labels[0].keys() | labels[1].keys())
    return GraphDifference(
        operators={name: (labels[0][name], labels[1][name]) for name in names},
        constants=(len(before.constants), len(after.constants)),
        added=Counter({f"{label} {location}": count for (label, location), count in (new - old).items()}),
        removed=Counter({f"{label} {location}": count for (label, location), count in (old - new).items()}),
    )


def graph_of(manifest: "Manifest", executable: "Executable", store: "Store") -> "Graph | None":
    """The stored graph; None for an artifact without graphs, such as one of neuronx-cc by an earlier nxpipe."""
    from nxpipe.emulator.ir.decoding import decode

    path = artifact_files.graph(executable.name)
    blob = next((file.blob for file in manifest.files if file.path == path), None)
    return None if blob is None else decode(store.read_blob(blob))


def _kinds(graph: "Graph") -> Counter[tuple[str, str]]:
    """Counts of nodes by operator, and by result type and module."""
    counts = Counter[tuple[str, str]]()
    for number, times in enumerate(_times(graph)):
        node = graph.nodes[number]
        location = f" at {node.origin.module}" if node.origin.module else ""
        counts[node.op.label, f"{node.result.type}{location}"] += times
    return counts


def _times(graph: "Graph") -> Iterator[int]:
    """The number of executions of each node."""
    counts = {number: repeat.count for repeat in graph.repeats for number in range(repeat.start, repeat.stop)}
    return (counts.get(number, 1) for number in range(len(graph.nodes)))


def _sides(pair: tuple[int, int]) -> dict[str, int]:
    return {"a": pair[0], "b": pair[1]}


# Compared figures, and their paths in utilisation.json.
FIGURES: Final[Mapping[str, tuple[str, ...]]] = {
    "predicted_ns": ("time", "latency_ns"),
    "instructions": ("instructions", "static"),
    "carried_out": ("instructions", "carried_out"),
    "code_bytes": ("footprint", "code"),
}


@dataclass(frozen=True)
class ProgramDifference:
    """Difference of a program in two artifacts. `figures` are (before, after), None if absent. `graph` is None if the
    graphs are equal or one is not stored."""

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
    """Differences of the programs that both artifacts have."""
    figures = [artifact_files.read(manifest, store) for manifest in (before, after)]
    known = {identity(program): program for program in before.executables}
    for new in after.executables:
        if old := known.get(identity(new)):
            sides = [figures[side].get(program.name) for side, program in enumerate((old, new))]
            yield ProgramDifference(
                name=new.name,
                degree=new.tensor_parallel,
                figures={
                    name: (number_at(sides[0], path), number_at(sides[1], path)) for name, path in FIGURES.items()
                },
                is_same_graph=old.graph_key == new.graph_key,
                graph=_graphs((before, old), (after, new), store) if old.graph_key != new.graph_key else None,
            )


def identity(program: "Executable") -> tuple[str, int, int, int]:
    """The key by which programs of two artifacts correspond: phase, batch, bucket, degree."""
    return program.phase, program.batch, program.sequence, program.tensor_parallel


def number_at(figures: Any, path: tuple[str, ...]) -> float | None:
    """A figure by path; None if the document, perhaps of another producer, has no number there."""
    for name in path:
        figures = figures.get(name) if isinstance(figures, Mapping) else None
    return figures if isinstance(figures, int | float) and not isinstance(figures, bool) else None


def _graphs(
    before: "tuple[Manifest, Executable]", after: "tuple[Manifest, Executable]", store: "Store"
) -> GraphDifference | None:
    old, new = (graph_of(*side, store) for side in (before, after))
    return graph_difference(old, new) if old and new else None


def measured_times(manifest: "Manifest", evidence: "Sequence[Evidence]") -> "dict[str, Timing]":
    """The timings of the first complete device evidence, by program; empty without one."""
    from nxpipe.artifact_store.evidence import DEVICE
    from nxpipe.pipeline.models.thresholds import complete_evidence

    complete = complete_evidence(manifest, evidence, DEVICE)
    programs = complete.programs if complete else ()
    return {compared.program: compared.timing for compared in programs if compared.timing}


@dataclass(frozen=True)
class TimingDifference:
    """Durations of a program on devices in two artifacts, (before, after) in ms; None without device evidence."""

    program: str
    figures: Mapping[str, tuple[float | None, float | None]]

    def document(self) -> dict[str, object]:
        figures = {name: {"a": before, "b": after} for name, (before, after) in self.figures.items()}
        return {"program": self.program, **figures}


def timing_differences(
    before: "Manifest", after: "Manifest", evidence: "Sequence[Sequence[Evidence]]"
) -> Iterator[TimingDifference]:
    """Durations of the programs that both artifacts have, where devices measured at least one of the two. `evidence`
    is that of either side."""
    timings = [measured_times(manifest, some) for manifest, some in zip((before, after), evidence, strict=True)]
    known = {identity(program): program for program in before.executables}
    for new in after.executables:
        old = known.get(identity(new))
        sides = timings[0].get(old.name) if old else None, timings[1].get(new.name)
        if old and any(sides):
            p50, p99 = ([getattr(side, name, None) for side in sides] for name in ("p50_ms", "p99_ms"))
            yield TimingDifference(new.name, {"p50_ms": (p50[0], p50[1]), "p99_ms": (p99[0], p99[1])})


_BLOCK: Final = 1 << 20  # elements per comparison


@dataclass(frozen=True)
class TensorChange:
    """Change of a tensor. `largest` is the maximal difference relative to the maximal element before; None is explained
    by `why`."""

    name: str
    largest: float | None
    why: str = ""

    def document(self) -> dict[str, object]:
        return asdict(self)


def tensor_changes(
    before: "Manifest", after: "Manifest", names: Sequence[str], store: "Store"
) -> Iterator[TensorChange]:
    """Changes of the named tensors. One tensor of each side is in memory at a time, or one pack of small ones."""
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
    for start in range(0, len(old), _BLOCK):
        old_block, new_block = (side[start : start + _BLOCK].astype(np.float64) for side in (old, new))
        if not (np.isfinite(old_block).all() and np.isfinite(new_block).all()):
            return TensorChange(name, None, "some elements are not finite")
        size, distance = max(size, float(abs(old_block).max())), max(distance, float(abs(new_block - old_block).max()))
    if not size:
        return TensorChange(name, None, "all elements were 0")
    return TensorChange(name, distance / size)


_DRIFT_BYTES: Final = 256 << 20  # of changed tensors, which are read from both artifacts
_LAYER: Final = re.compile(r"(.*?\.\d+)\.")


def weights_drift(before: "Manifest", after: "Manifest", store: "Store") -> dict[str, object]:
    """The norm of the differences over the norm before, by group of tensors: each layer of a stack, else each module.

    Equal tensors are not read. `groups` is None, and `why` says so, if more bytes changed than are worth reading.
    """
    old, new = ({tensor.name: tensor for tensor in side.weights} for side in (before, after))
    common = [name for name, tensor in new.items() if name in old and _is_comparable(old[name], tensor)]
    changed = [name for name in common if old[name].blob != new[name].blob]
    equal, size = len(common) - len(changed), sum(old[name].blob.size + new[name].blob.size for name in changed)
    counts = {"equal": equal, "changed": len(changed), "only_in_one": len(old) + len(new) - 2 * len(common)}
    if size > _DRIFT_BYTES:
        return counts | {"groups": None, "why": f"{len(changed):,} tensors changed, and {size:,} bytes would be read"}
    sums: dict[str, list[float]] = {}
    reading = (read_weights(store.blobs, [tensors[name] for name in changed]) for tensors in (old, new))
    for (one, one_bytes), (other, other_bytes) in zip(*reading, strict=True):
        distance, norm = _squares(_elements(one, one_bytes), _elements(other, other_bytes))
        group = sums.setdefault(_group(one.name), [0.0, 0.0, 0])
        group[0], group[1], group[2] = group[0] + distance, group[1] + norm, group[2] + 1
    groups = [
        {"group": name, "tensors": int(count), "relative": (distance / norm) ** 0.5}
        for name, (distance, norm, count) in sums.items()
        if norm and isfinite(distance) and isfinite(norm)
    ]
    return counts | {"groups": groups}


def _is_comparable(old: "Tensor", new: "Tensor") -> bool:
    return old.shape == new.shape and {old.dtype, new.dtype} <= _known_types()


def _group(tensor: str) -> str:
    """`model.layers.3` of a layer's tensor, else the module that has it."""
    layer = _LAYER.match(tensor)
    return layer[1] if layer else tensor.rpartition(".")[0] or tensor


def _squares(old: "np.ndarray[Any, Any]", new: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """The sums of the squared differences and of the squares before."""
    import numpy as np

    distance = norm = 0.0
    for start in range(0, len(old), _BLOCK):
        old_block, new_block = (side[start : start + _BLOCK].astype(np.float64) for side in (old, new))
        distance, norm = distance + float(((new_block - old_block) ** 2).sum()), norm + float((old_block**2).sum())
    return distance, norm


def _elements(tensor: "Tensor", data: bytes | memoryview) -> "np.ndarray[Any, Any]":
    import numpy as np

    from nxpipe.emulator.ir.types import DType

    return np.frombuffer(data, DType(tensor.dtype).stored)


def _known_types() -> set[str]:
    from nxpipe.emulator.ir.types import DType

    return {str(dtype) for dtype in DType}


def _type(tensor: "Tensor") -> str:
    return f"{tensor.dtype}[{','.join(map(str, tensor.shape))}]"
