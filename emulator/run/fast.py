"""Fast execution of a graph: each node by its operator's vectorised numerics, for whole models on a laptop.

Loading a graph unrolls its repeats, rounds every parameter to its type once, and computes everything that depends on
parameters and constants alone, such as the casts that autocast puts on weights.

All ranks of a sharded graph run in one process, a thread for each, synchronised at the collectives. Results do not
depend on the timing of threads, to the bit: ranks share nothing but their contributions, which every rank reads in the
order of ranks.
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
    """Outputs by name. Float outputs of any type are float32 arrays, exactly representable in that type."""
    return LoadedGraph(graph, parameters).run(inputs)


class LoadedGraph:
    """A graph with its weights, ready to run any number of times."""

    def __init__(self, graph: Graph, parameters: Mapping[str, Array]) -> None:
        self._graph = graph = unroll(graph)
        fixed, self._moving = _split(graph.nodes, set(graph.inputs.values()))
        # With portable numerics, as the compiler folds constants: the result is the same before and after folding.
        constant, _ = _split(graph.nodes, {*graph.inputs.values(), *graph.parameters.values()})
        self._portable = {node.result for node in constant}
        self._uses = Counter(operand for node in graph.nodes for operand in node.operands)
        self._uses.update(graph.outputs.values())
        self._loaded: dict[Value, Array] = dict(graph.constants)
        self._waiting = {value: name for name, value in graph.parameters.items()}
        uses = self._uses.copy()
        # A parameter is read when it is first needed, so that of a large one only its converted form stays in memory.
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
        """One forward pass. Intermediate values are freed after their last use."""
        for name in inputs:
            if name not in self._graph.inputs:
                raise ExecutionError(f"the graph has no input {name!r}; it takes {', '.join(self._graph.inputs)}")
        known: dict[Value, Array] = dict(self._loaded)
        for name, value in self._graph.inputs.items():
            known[value] = _accepted("input", name, value.type, inputs)
        _run(self._moving, known, self._uses.copy())
        return {name: np.array(known[value]) for name, value in self._graph.outputs.items()}


def _split(nodes: Iterable[Node], varying: set[Value]) -> tuple[list[Node], list[Node]]:
    """The nodes with the same result in every run, and the others."""
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
    """Execute in order; `uses` counts the reads left of each value, and a value without any is dropped."""
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
    """A tensor of the caller in the form in which values of its declared type are held."""
    if name not in given:
        raise MissingTensor(role, name, str(declared))
    array = np.asarray(given[name])
    if array.shape != declared.shape or _kind(array) != _kind(np.empty(0, declared.dtype.held)):
        raise WrongTensor(role, name, str(declared), f"{array.dtype}{list(array.shape)}")
    if declared.dtype.is_float:
        floats = array.astype(np.float32, copy=False)
        rounded = round_to(floats, declared.dtype)
        # Do not hold numbers twice that needed no rounding.
        return floats if np.array_equal(floats, rounded) else rounded
    return array.astype(declared.dtype.held, copy=False)


def _kind(array: Array) -> str:
    """Boolean, integer or float; numpy files bfloat16 under void, because an extension brings it."""
    if array.dtype == np.bool_:
        return "boolean"
    return "integer" if np.issubdtype(array.dtype, np.integer) else "float"


_Result = TypeVar("_Result")

States = Sequence[Mapping[str, Array]]  # of each rank, by name


class Runnable(Protocol):
    """A program with its weights, loaded on all of its ranks."""

    def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
        """The outputs, equal on all ranks, and each rank's states after it."""


class _Meeting:
    """The exchange of contributions among ranks, by a table and a barrier."""

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

    def leave(self) -> None:
        """Release the other ranks: a rank that failed takes part in no further exchange."""
        self._barrier.abort()


@dataclass(frozen=True)
class _Member:
    rank: int
    degree: int
    meeting: _Meeting

    def exchange(self, mine: Array) -> Sequence[Array]:
        return self.meeting.exchange(self.rank, mine)


def degree_of(graph: Graph) -> int:
    """The number of ranks that a graph's collectives are for."""
    collectives = AllReduce | AllGather | RankSlice | ReduceScatter
    degrees = {node.op.degree for node in graph.nodes if isinstance(node.op, collectives)}
    if len(degrees) > 1:
        raise ExecutionError(f"the graph's collectives are for different numbers of ranks: {sorted(degrees)}")
    return degrees.pop() if degrees else 1


class LoadedRanks:
    """A sharded graph with its weights on every rank, ready to run any number of times.

    Weights are given whole, by their names in the checkpoint; each rank keeps its own pieces. Between runs, each
    rank's states stay with it, as they stay in its device's memory.
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
            raise ExecutionError(f"the states of {len(before)} ranks were given to a graph for {self.degree}")
        answers = self._on_every_rank(lambda rank: self._loaded[rank].run({**inputs, **before[rank]}))
        carried = self._graph.inputs.keys() & self._graph.outputs.keys()
        after = [{name: answer[name] for name in answer if name in carried} for answer in answers]
        return {name: array for name, array in answers[0].items() if name not in carried}, after

    def _on_every_rank(self, work: Callable[[int], _Result]) -> list[_Result]:
        meeting = _Meeting(self.degree)

        def take_part(rank: int) -> _Result:
            MEMBERSHIP.set(_Member(rank, self.degree, meeting))
            try:
                return work(rank)
            except BaseException:
                meeting.leave()
                raise

        with ThreadPoolExecutor(self.degree) as threads:
            ranks = [threads.submit(copy_context().run, take_part, rank) for rank in range(self.degree)]
        faults = [fault for fault in (rank.exception() for rank in ranks) if fault is not None]
        for fault in sorted(faults, key=lambda fault: isinstance(fault, BrokenBarrierError)):
            raise fault  # the cause, rather than the broken barriers of the other ranks
        return [rank.result() for rank in ranks]


class LoadedProgram:
    """A compiled program on its ranks, with whole tensors as inputs, states and outputs."""

    def __init__(self, program: "CompiledGraph", ranks: Runnable) -> None:
        self._program = program
        self._ranks = ranks

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One forward pass: the outputs, among them the states after it."""
        program, given = self._program, dict(inputs)
        program.require_inputs(given)
        before: list[dict[str, Array]] = [{} for _ in range(program.degree)]
        for name in program.graph.inputs.keys() & program.graph.outputs.keys() & given.keys():
            state = given.pop(name)
            piece = program.states.get(name)
            shares = piece.parted(state, program.degree) if piece else [state] * program.degree
            for own, share in zip(before, shares, strict=True):
                own[name] = share
        outputs, after = self._ranks.run(given, before)
        for name in after[0]:
            shares = [own[name] for own in after]
            outputs[name] = program.states[name].joined(shares) if name in program.states else shares[0]
        return {name: outputs[name] for name in program.graph.outputs}
