"""From a graph to a program: nodes are lowered in their order, layers that repeat inside one loop."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

from nxpipe.emulator.errors import OutOfMemory, Taken
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Repeat, Value
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import cost, moved, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Program, within
from nxpipe.emulator.lower.buffers import placed
from nxpipe.emulator.lower.lowering import LOWERINGS, Lowering, NotLowered
from nxpipe.emulator.lower.places import Series, half
from nxpipe.emulator.lower.residence import Settled, settled
from nxpipe.emulator.lower.view import View
from nxpipe.emulator.lower.work import Work
from nxpipe.emulator.schedule.sync import synchronised

_TRIALS: Final = 3  # that may fail, of nodes that leave room to something


def lower(graph: Graph, core: str, ranks: int = 1) -> Program:
    """The program of a graph for one core of this generation. What nodes leave each other lies in SBUF where they have
    not taken all of it. For whatever finds no room there it is tried what they do if they have to leave some."""
    best, tried = _Walk(graph, core, ranks, {}).written(), 0
    while tried < min(_TRIALS, len(best.settled.refused)):
        try:
            other = _Walk(graph, core, ranks, best.settled.kept + best.settled.refused[tried]).written()
        except OutOfMemory:
            other = best
        best, tried = min(best, other, key=lambda written: written.ns), tried + (other.ns >= best.ns)
    return synchronised(best.program)


@dataclass(frozen=True)
class _Written:
    """Nobody waits for anybody yet."""

    program: Program
    settled: Settled

    @cached_property
    def ns(self) -> float:
        """What it is expected to take: the modules follow each other, in each of which all engines work at once."""
        core, traffic = CORES[self.program.core], 0
        busy: dict[int, dict[Engine, float]] = defaultdict(lambda: defaultdict(float))
        for instruction, counts in within(self.program.body):
            times, engine = prod(counts), instruction.engine
            traffic += times * sum(moved(place) for place in instruction.places.values() if isinstance(place, Far))
            share = share_of_dma(instruction, core) if engine in DMA_QUEUES else 1.0
            engine = DMA_QUEUES[0] if engine in DMA_QUEUES else engine
            busy[instruction.note][engine] += times * cost(instruction, core).ns * share
        return sum(max(engines.values()) for engines in busy.values()) + Work(bytes=traffic).ns(core)


class _Walk:
    """`kept`: of nodes, how many bytes of each partition of SBUF they leave to what lies there."""

    def __init__(self, graph: Graph, core: str, ranks: int, kept: Mapping[object, int]) -> None:
        self._graph = graph
        self._low = Lowering(graph, core, ranks)
        self._places = self._low.places
        self._kept = kept

    def written(self) -> _Written:
        low, places = self._low, self._places
        places.place_inputs()
        places.place_outputs()
        position = 0
        for repeat in self._graph.repeats:
            self._nodes(self._graph.nodes[position : repeat.start])
            self._repeat(repeat)
            position = repeat.stop
        self._nodes(self._graph.nodes[position:])
        self._finish_outputs()
        found = settled(low.k.body, places.buffers.table, low.k.makers, low.k.core)
        buffers = placed(found.table, found.body)
        notes, constants = tuple(low.notes), dict(places.constants)
        return _Written(Program(low.core, low.ranks, buffers, found.body, notes, constants), found)

    def _nodes(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if not self._low.is_due(node) or self._low.puts_off(node):
                continue
            self._low.k.note = self._low.note(node)
            function = LOWERINGS.get(type(node.op))
            if function is None:
                raise NotLowered.at(node)
            kept = self._kept.get(node.result, 0)
            with self._low.k.room(), self._low.k.made_for(node.result, kept), _blamed(node):
                function(self._low, node, node.op)

    def _repeat(self, repeat: Repeat) -> None:
        low, places = self._low, self._places
        before = dict(places.views)
        carried = {entry: self._two_halves(entry) for entry in repeat.carried}
        taken = {first: places.taken(first, later) for first, later in repeat.taken.items()}
        given = {value: places.given(value, row) for value, row in repeat.given.items()}
        with low.k.loop(repeat.count) as turn:
            for first, series in taken.items():
                places.take(first, series.at(turn))
            for entry, halves in carried.items():
                places.views[entry] = half(halves, turn)
                places.homes[repeat.carried[entry]] = half(halves, turn + 1)
            for value, series in given.items():
                if value not in places.homes and value not in places.stored:
                    places.homes[value] = series.at(turn)
            self._nodes(self._graph.nodes[repeat.start : repeat.stop])
            for value, series in given.items():
                if places.homes.get(value) != series.at(turn):
                    low.copy(series.at(turn), places.views[value])
        places.views |= before
        self._after(repeat, carried, given)

    def _after(self, repeat: Repeat, carried: Mapping[Value, View], given: Mapping[Value, Series]) -> None:
        """Seen from behind the loop, a value of the inside is what the last turn made of it."""
        views = self._places.views
        for value, row in repeat.given.items():
            for number, each in enumerate(row):
                views[each] = given[value].at(Affine(number))
            views[value] = given[value].at(Affine(repeat.count - 1))
        for entry, halves in carried.items():
            views[repeat.carried[entry]] = half(halves, Affine(repeat.count))

    def _two_halves(self, entry: Value) -> View:
        """What a turn hands to the next: it reads one half and writes the other."""
        source = self._places.views[entry]
        halves = self._places.scratch(entry.type.dtype, entry.type.shape, count=2)
        self._low.copy(halves, source)
        return halves

    def _finish_outputs(self) -> None:
        """What is an output by another name as well, or is no node's result, is copied; so is what a loop hands on."""
        for name, value in self._graph.outputs.items():
            home = self._places.output(name)
            if self._places.views[value] != home:
                self._low.copy(home, self._places.views[value])


@contextmanager
def _blamed(node: Node) -> Iterator[None]:
    """A tile that does not fit is its node's: whoever has the model can make the node's tensors smaller."""
    try:
        yield
    except OutOfMemory as fault:
        who = f"{node.op.label} at {str(node.origin) or 'an unknown place'}, for {fault.who},"
        ends = [(f"its operand {number}", value) for number, value in enumerate(node.operands)]
        ends.append(("its result", node.result))
        tensors = [Taken(what, str(value.type), value.type.nbytes) for what, value in ends]
        largest = sorted(tensors, key=lambda taken: -taken.nbytes)
        way_out = "make them narrower by a smaller bucket, or by dividing the model among more cores (--tp)"
        raise OutOfMemory(who, fault.memory, fault.need, fault.room, largest, way_out) from fault
