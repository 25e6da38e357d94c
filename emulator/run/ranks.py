"""All ranks of a sharded graph in one process: a thread for each, meeting at the collectives.

Whatever the threads' timing, results are the same to the bit: ranks share nothing but what they exchange, and every
exchange is read in the order of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import Protocol, TypeVar

from nxpipe.emulator.compile import Program
from nxpipe.emulator.errors import ExecutionError
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import AllGather, AllReduce, RankSlice, ReduceScatter
from nxpipe.emulator.ops.collective import MEMBERSHIP
from nxpipe.emulator.run.fast import LoadedGraph

_Result = TypeVar("_Result")

States = Sequence[Mapping[str, Array]]  # of each rank, by name


class Runnable(Protocol):
    """A program with its weights, on all of its ranks, whoever carries it out."""

    def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
        """The outputs, equal on all ranks, and each rank's states after it."""


class _Meeting:
    """Where ranks lay down what they brought and pick up what everybody brought."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._table: list[Array | None] = [None] * degree
        self._barrier = Barrier(degree)

    def exchange(self, rank: int, mine: Array) -> Sequence[Array]:
        self._table[rank] = mine
        self._barrier.wait()
        brought = [array for array in self._table if array is not None]
        self._barrier.wait()  # nobody lays down the next before everybody has read this
        return brought

    def leave(self) -> None:
        """A rank that failed comes to no further meeting; the others must not wait for it."""
        self._barrier.abort()


@dataclass(frozen=True)
class _Member:
    rank: int
    degree: int
    meeting: _Meeting

    def exchange(self, mine: Array) -> Sequence[Array]:
        return self.meeting.exchange(self.rank, mine)


def degree_of(graph: Graph) -> int:
    """How many ranks a graph is for: its collectives say so."""
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
            raise fault  # the cause, not that others waited in vain
        return [rank.result() for rank in ranks]


class LoadedProgram:
    """A compiled program on its ranks, seen from outside: whole tensors go in, and whole ones come out."""

    def __init__(self, program: Program, ranks: Runnable) -> None:
        self._program = program
        self._ranks = ranks

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One forward pass: the outputs, and among them what the states are after it."""
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
