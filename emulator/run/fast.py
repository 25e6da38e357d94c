"""Fast execution of a graph with the vectorised numerics of its operators, for whole models on a laptop.

Loading a graph unrolls its repeats, rounds every parameter to its type once, and precomputes all values that depend on
parameters and constants only, such as autocast's casts of weights.

All ranks of a sharded graph run in one process, with one thread for each rank and a barrier at each collective. Results
do not depend on the timing of threads: ranks share only their contributions, which every rank reads in rank order.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from nxpipe.emulator.errors import ExecutionError, IndexOutOfRange, MissingTensor, WrongTensor
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.numerics import Array, round_to, settle
from nxpipe.emulator.ops import AllGather, AllReduce, RankSlice, ReduceScatter
from nxpipe.emulator.ops.collective import MEMBERSHIP
from nxpipe.emulator.ops.portable import compute

if TYPE_CHECKING:
    from nxpipe.emulator.compile import CompiledGraph


def execute(graph: Graph, parameters: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs by name. Float outputs are float32 arrays whose numbers are representable in the output's type."""
    return LoadedGraph(graph, parameters).run(inputs)


class LoadedGraph:
    """A graph with its weights, ready to run any number of times."""

    def __init__(self, graph: Graph, parameters: Mapping[str, Array]) -> None:
        self._graph = graph = unroll(graph)
        fixed, self._varying = _split(graph.nodes, set(graph.inputs.values()))
        # Constants are computed with the portable numerics of constant folding, so folding does not change the result.
        constant, _ = _split(graph.nodes, {*graph.inputs.values(), *graph.parameters.values()})
        self._portable = {node.result for node in constant}
        self._uses = Counter(operand for node in graph.nodes for operand in node.operands)
        self._uses.update(graph.outputs.values())
        self._loaded: dict[Value, Array] = dict(graph.constants)
        self._unread = {value: name for name, value in graph.parameters.items()}
        uses = self._uses.copy()
        # A parameter is read at its first use, so that only the converted form of a large parameter stays in memory.
        for node in fixed:
            self._load(node.operands, parameters)
            _run((node,), self._loaded, uses, self._portable)
        self._load(tuple(self._unread), parameters)

    def _load(self, values: Iterable[Value], parameters: Mapping[str, Array]) -> None:
        for value in values:
            if value in self._unread:
                name = self._unread.pop(value)
                self._loaded[value] = _validated("parameter", name, value.type, parameters)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One forward pass. Intermediate values are freed after their last use."""
        for name in inputs:
            if name not in self._graph.inputs:
                raise ExecutionError(f"the graph has no input {name!r}; it takes {', '.join(self._graph.inputs)}")
        known: dict[Value, Array] = dict(self._loaded)
        for name, value in self._graph.inputs.items():
            known[value] = _validated("input", name, value.type, inputs)
        _run(self._varying, known, self._uses.copy())
        return {name: np.array(known[value]) for name, value in self._graph.outputs.items()}


def _split(nodes: Iterable[Node], varying: set[Value]) -> tuple[list[Node], list[Node]]:
    """The nodes with the same result in every run, and the nodes that depend on `varying` values."""
    fixed: list[Node] = []
    varying_nodes: list[Node] = []
    for node in nodes:
        if varying.isdisjoint(node.operands):
            fixed.append(node)
        else:
            varying.add(node.result)
            varying_nodes.append(node)
    return fixed, varying_nodes


def _run(
    nodes: Iterable[Node], known: MutableMapping[Value, Array], uses: Counter[Value], portable: Container[Value] = ()
) -> None:
    """Execute nodes in order. `uses` counts the remaining reads of each value; a value without reads is freed."""
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


def _validated(role: str, name: str, declared: TensorType, arrays: Mapping[str, Array]) -> Array:
    """A tensor of the caller, validated and converted to the numpy type that holds values of its declared type."""
    if name not in arrays:
        raise MissingTensor(role, name, str(declared))
    array = np.asarray(arrays[name])
    if array.shape != declared.shape or _kind(array) != _kind(np.empty(0, declared.dtype.held)):
        raise WrongTensor(role, name, str(declared), f"{array.dtype}{list(array.shape)}")
    if declared.dtype.is_float:
        floats = array.astype(np.float32, copy=False)
        rounded = round_to(floats, declared.dtype)
        # If no number was rounded, return the caller's array, so that memory holds it once.
        return floats if np.array_equal(floats, rounded) else rounded
    return array.astype(declared.dtype.held, copy=False)


def _kind(array: Array) -> str:
    """Boolean, integer or float. numpy reports bfloat16, an extension type, as void; it counts as float."""
    if array.dtype == np.bool_:
        return "boolean"
    return "integer" if np.issubdtype(array.dtype, np.integer) else "float"


_Result = TypeVar("_Result")

States = Sequence[Mapping[str, Array]]  # the states of each rank, by name


class Runnable(Protocol):
    """A loaded program with its weights, on all of its ranks."""

    def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
        """The outputs, which are equal on all ranks, and each rank's states after the run."""


class _Exchange:
    """The exchange of contributions among ranks through a shared table and a barrier."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._table: list[Array | None] = [None] * degree
        self._barrier = Barrier(degree)

    def exchange(self, rank: int, mine: Array) -> Sequence[Array]:
        self._table[rank] = mine
        self._barrier.wait()
        contributions = [array for array in self._table if array is not None]
        self._barrier.wait()  # no rank overwrites the table before every rank has read it
        return contributions

    def abort(self) -> None:
        """Abort the barrier after a rank failed, so that the other ranks do not wait for it."""
        self._barrier.abort()


@dataclass(frozen=True)
class _RankMembership:
    rank: int
    degree: int
    shared: _Exchange

    def exchange(self, mine: Array) -> Sequence[Array]:
        return self.shared.exchange(self.rank, mine)


def degree_of(graph: Graph) -> int:
    """The number of ranks of a graph's collectives."""
    collectives = AllReduce | AllGather | RankSlice | ReduceScatter
    degrees = {node.op.degree for node in graph.nodes if isinstance(node.op, collectives)}
    if len(degrees) > 1:
        raise ExecutionError(f"the graph's collectives are for different numbers of ranks: {sorted(degrees)}")
    return degrees.pop() if degrees else 1


class LoadedRanks:
    """A sharded graph with its weights on every rank, ready to run any number of times.

    Weights are passed whole, by their names in the checkpoint; each rank keeps its own shard. A rank's states stay on
    the rank between runs, as they do in device memory.
    """

    def __init__(self, graph: Graph, parameters: Mapping[str, Array]) -> None:
        self.degree = degree_of(graph)
        self._graph = graph
        self._loaded = self._on_every_rank(lambda rank: LoadedGraph(graph, parameters))

    def run(
        self, inputs: Mapping[str, Array], states: States | None = None
    ) -> tuple[dict[str, Array], list[dict[str, Array]]]:
        """One forward pass."""
        before = states or [{}] * self.degree
        if len(before) != self.degree:
            raise ExecutionError(f"the states are for {len(before)} ranks, but the graph is for {self.degree}")
        results = self._on_every_rank(lambda rank: self._loaded[rank].run({**inputs, **before[rank]}))
        state_names = self._graph.inputs.keys() & self._graph.outputs.keys()
        after = [{name: result[name] for name in result if name in state_names} for result in results]
        return {name: array for name, array in results[0].items() if name not in state_names}, after

    def _on_every_rank(self, work: Callable[[int], _Result]) -> list[_Result]:
        shared = _Exchange(self.degree)

        def run_rank(rank: int) -> _Result:
            MEMBERSHIP.set(_RankMembership(rank, self.degree, shared))
            try:
                return work(rank)
            except BaseException:
                shared.abort()
                raise

        if self.degree == 1:
            return [copy_context().run(run_rank, 0)]
        with ThreadPoolExecutor(self.degree) as threads:
            ranks = [threads.submit(copy_context().run, run_rank, rank) for rank in range(self.degree)]
        faults = [fault for fault in (rank.exception() for rank in ranks) if fault is not None]
        for fault in sorted(faults, key=lambda fault: isinstance(fault, BrokenBarrierError)):
            raise fault  # raise the cause, not the broken barriers of the other ranks
        return [rank.result() for rank in ranks]


class LoadedProgram:
    """A compiled program on its ranks, whose inputs, states and outputs are whole tensors."""

    def __init__(self, program: "CompiledGraph", ranks: Runnable) -> None:
        self._program = program
        self._ranks = ranks

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One forward pass: the outputs, including the states after the run."""
        program, remaining = self._program, dict(inputs)
        program.require_inputs(remaining)
        before: list[dict[str, Array]] = [{} for _ in range(program.degree)]
        for name in program.graph.inputs.keys() & program.graph.outputs.keys() & remaining.keys():
            state = remaining.pop(name)
            sharding = program.states.get(name)
            shares = sharding.split(state, program.degree) if sharding else [state] * program.degree
            for own, share in zip(before, shares, strict=True):
                own[name] = share
        outputs, after = self._ranks.run(remaining, before)
        for name in after[0]:
            shares = [own[name] for own in after]
            outputs[name] = program.states[name].joined(shares) if name in program.states else shares[0]
        return {name: outputs[name] for name in program.graph.outputs}
