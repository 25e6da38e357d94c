"""Fast execution: each node by its operator's vectorised numerics, the way whole models are emulated on a laptop.

Loading a graph writes its repeats out, rounds every parameter to its type once, and runs once and for all whatever
depends on nothing but parameters and constants, such as the casts that autocast puts on weights.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, MutableMapping

import numpy as np

from nxpipe.emulator.errors import ExecutionError, IndexOutOfRange, MissingTensor, WrongTensor
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array, round_to, settle
from nxpipe.emulator.ops.portable import compute


def execute(graph: Graph, parameters: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name. Float outputs are float32 arrays whatever their type, exactly representable in it."""
    return LoadedGraph(graph, parameters).run(inputs)


class LoadedGraph:
    """A graph with its weights, ready to run any number of times."""

    def __init__(self, graph: Graph, parameters: Mapping[str, Array]) -> None:
        self._graph = graph = unroll(graph)
        fixed, self._moving = _split(graph.nodes, set(graph.inputs.values()))
        # As constants are folded: a graph means the same before and after.
        constant, _ = _split(graph.nodes, {*graph.inputs.values(), *graph.parameters.values()})
        self._portable = {node.result for node in constant}
        self._uses = Counter(operand for node in graph.nodes for operand in node.operands)
        self._uses.update(graph.outputs.values())
        self._loaded: dict[Value, Array] = dict(graph.constants)
        self._waiting = {value: name for name, value in graph.parameters.items()}
        uses = self._uses.copy()
        # A parameter is asked for when it is needed first, so that of large ones only what they become is in memory.
        for node in fixed:
            self._load(node.operands, parameters)
            _run((node,), self._loaded, uses, self._portable)
        self._load(tuple(self._waiting), parameters)

    def _load(self, wanted: Iterable[Value], parameters: Mapping[str, Array]) -> None:
        for value in wanted:
            if value in self._waiting:
                name = self._waiting.pop(value)
                self._loaded[value] = _accepted("parameter", name, value.type, parameters)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One forward pass. Values that moved are freed after their last use."""
        for name in inputs:
            if name not in self._graph.inputs:
                raise ExecutionError(f"the graph has no input {name!r}; it takes {', '.join(self._graph.inputs)}")
        known: dict[Value, Array] = dict(self._loaded)
        for name, value in self._graph.inputs.items():
            known[value] = _accepted("input", name, value.type, inputs)
        _run(self._moving, known, self._uses.copy())
        return {name: np.array(known[value]) for name, value in self._graph.outputs.items()}


def _split(nodes: Iterable[Node], varying: set[Value]) -> tuple[list[Node], list[Node]]:
    """The nodes that give the same result in every run, and those that do not."""
    fixed: list[Node] = []
    moving: list[Node] = []
    for node in nodes:
        if varying.isdisjoint(node.operands):
            fixed.append(node)
        else:
            varying.add(node.result)
            moving.append(node)
    return fixed, moving


def _run(
    nodes: Iterable[Node], known: MutableMapping[Value, Array], uses: Counter[Value], portable: Container[Value] = ()
) -> None:
    """Execute in order; `uses` counts how often each value will still be read, and a value nobody reads is dropped."""
    with np.errstate(all="ignore"):  # the engines follow IEEE 754 and never trap
        for node in nodes:
            result = _compute(node, [known[operand] for operand in node.operands], node.result in portable)
            for operand in node.operands:
                uses[operand] -= 1
                if not uses[operand]:
                    known.pop(operand, None)
            if uses[node.result]:
                known[node.result] = result


def _compute(node: Node, operands: list[Array], portable: bool) -> Array:
    try:
        result = compute(node.op, *operands) if portable else np.asarray(node.op.compute(*operands))
    except IndexOutOfRange as fault:
        raise IndexOutOfRange(fault.index, fault.size, f"{node.op.label} of {node.origin}") from None
    return result if node.op.moves_only else settle(result, node.result.type.dtype)


def _accepted(role: str, name: str, declared: TensorType, given: Mapping[str, Array]) -> Array:
    """A tensor from outside, in the form in which values of its declared type are held."""
    if name not in given:
        raise MissingTensor(role, name, str(declared))
    array = np.asarray(given[name])
    if array.shape != declared.shape or _kind(array) != _kind(np.empty(0, declared.dtype.held)):
        raise WrongTensor(role, name, str(declared), f"{array.dtype}{list(array.shape)}")
    if declared.dtype.is_float:
        floats = array.astype(np.float32, copy=False)
        rounded = round_to(floats, declared.dtype)
        # Numbers that needed no rounding are not held twice.
        return floats if np.array_equal(floats, rounded) else rounded
    return array.astype(declared.dtype.held, copy=False)


def _kind(array: Array) -> str:
    """Boolean, integer or float; numpy files bfloat16 under void, because an extension brings it."""
    if array.dtype == np.bool_:
        return "boolean"
    return "integer" if np.issubdtype(array.dtype, np.integer) else "float"
