"""What a program's graph has that another one has not."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nxpipe.pipeline.compile import artifact_files

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.ir.decoding import decode
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


def between(before: "Graph", after: "Graph") -> GraphDifference:
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

    wanted = artifact_files.graph(executable.name)
    blob = next((file.blob for file in manifest.files if file.path == wanted), None)
    return None if blob is None else decode(store.read_blob(blob))


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
