"""What the operators' functions write instructions with. Every operator's function is found by its class in
`LOWERINGS`; `Lowering` tells it where its operands lie and where its result goes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias, TypeVar

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.lower.buffers import on_device
from nxpipe.emulator.lower.corners import copy_turned, turned_axis
from nxpipe.emulator.lower.ending import Chain, Ending, chained, kept_rows
from nxpipe.emulator.lower.exchange import pays_in_pieces
from nxpipe.emulator.lower.following import Following
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.lifetimes import Lifetimes
from nxpipe.emulator.lower.places import Places
from nxpipe.emulator.lower.reading import Reading
from nxpipe.emulator.lower.view import View, packed
from nxpipe.emulator.lower.waiting import Waiting
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import AllReduce, Concat, Transpose
from nxpipe.emulator.ops.base import Operator

Kind = TypeVar("Kind", bound=Operator)
Writes: TypeAlias = Callable[["Lowering", Node, Kind], None]
LOWERINGS: dict[type[Operator], Writes[Any]] = {}


def lowers(*kinds: type[Operator]) -> Callable[[Writes[Kind]], Writes[Kind]]:
    """Marks the function that writes the instructions of an operator, or of several."""

    def register(function: Writes[Kind]) -> Writes[Kind]:
        LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return register


class NotLowered(CompileError):
    """An operator, or a form of it, for which no instructions are known."""

    @classmethod
    def at(cls, node: Node) -> "NotLowered":
        return cls(f"there are no instructions for {node.op.label} at {str(node.origin) or 'an unknown place'}")


class Lowering:
    """`k` writes instructions; `view` says where a value lies, `home` where it is to be put."""

    def __init__(self, graph: Graph, core: str, ranks: int) -> None:
        self.graph = graph
        self.k = Kernel(CORES[core])
        self.core = core
        self.ranks = ranks
        self._lifetimes = Lifetimes(graph)
        self._reading = Reading(graph)
        self.places = Places(graph, self._lifetimes)
        self._waiting = Waiting(graph, self.places, self._reading)
        self._by_row: set[int] = set()  # buffers that are written a row to a lane
        self._done: set[Value] = set()  # results of nodes that an earlier one has taken in
        self.notes: dict[str, int] = {"": 0}

    def is_due(self, node: Node) -> bool:
        """Neither the host has done it once and for all, nor an earlier node with its own work."""
        return node.result not in self.places.stored and node.result not in self._done

    def puts_off(self, node: Node) -> bool:
        """Whether a later node does it with its own work."""
        return self._waiting.puts_off(node)

    def note(self, node: Node) -> int:
        """The number of the place in the model that it comes from."""
        return self.notes.setdefault(str(node.origin), len(self.notes))

    def view(self, value: Value) -> View:
        """Where a value lies in its own type."""
        view, dtype = self.lying(value), on_device(value.type.dtype)
        if view.dtype is not dtype:
            self.places.views[value] = self.scratch(dtype, view.shape)
            self.copy(self.places.views[value], view)
        return self.places.views[value]

    def lying(self, value: Value) -> View:
        """Where a value lies. What an exact cast makes lies where its operand does, in the type of that, for readers
        that widen it as they load it."""
        return self.places.views[value]

    def home(self, value: Value) -> View:
        """Where the result of a node is to be written, row by row."""
        homes = self.places.homes
        if value not in homes:
            homes[value] = self.scratch(value.type.dtype, value.type.shape)
        self.places.views[value] = homes[value]
        return homes[value]

    def turned_home(self, value: Value) -> View:
        """As `home`, of a result that may be written in any order: if all that becomes of it is a transposition, it is
        written where that would be."""
        turn = self.only(value)
        if turn is None or not isinstance(turn.op, Transpose):
            return self.home(value)
        self._done.add(turn.result)
        back = tuple(turn.op.order.index(axis) for axis in range(value.type.rank))
        self.places.views[value] = self.home(turn.result).transposed(back)
        return self.lying(value)

    def constant(self, data: Array, dtype: DType) -> View:
        return self.places.constant(data, dtype)

    def rank(self) -> View:
        return self.places.rank()

    def scratch(self, dtype: Any, shape: tuple[int, ...]) -> View:
        return self.places.scratch(dtype, shape)

    def alias(self, value: Value, view: View) -> None:
        """The value lies where `view` says, unless it has to be somewhere else."""
        home = self.places.homes.get(value)
        if home is not None:
            self.copy(home, view)
        self.places.views[value] = home or view

    # Elementwise nodes

    def ending(self, result: Value, width: int) -> Ending:
        """What follows a node whose result is made piece by piece, as a matrix of rows so wide: the elementwise nodes
        behind it are taken in, and are done with it."""
        found = self.following(result, width)
        found.follow(result)
        return self.ended(found, result)

    def following(self, result: Value, width: int) -> Following:
        """To find what follows results that are matrices of rows so wide."""
        return self._following((result.type.elements // width if width else 0, width))

    def ended(self, found: Following, result: Value, read_here: Sequence[Node] = ()) -> Ending:
        """What was found is done with the result; these nodes read of it what is still in SBUF."""
        chain = self._chained(found, read_here)
        return Ending(self.k, result, replace(chain, kept=kept_rows(self.k, chain.sources)))

    def only(self, value: Value) -> Node | None:
        """The one node that reads a value, if nobody else wants to find it."""
        return None if value in self.places.homes else self._reading.only(value)

    def is_needed(self, value: Value, readers: Sequence[Node]) -> bool:
        """Whether others than these nodes want to find a value in HBM."""
        return value in self.places.homes or self._reading.is_needed(value, {node.result for node in readers})

    def at_hand(self, value: Value, result: Value) -> list[Node]:
        """The readers of a value that can be carried out with the node of that result: all else that they need is
        there."""

        def others(node: Node) -> bool:
            return all(operand == value or operand in self.places.views for operand in node.operands)

        return [node for node in self._reading.beside(value, result) if self.is_due(node) and others(node)]

    def chain(self, node: Node) -> Chain:
        """An elementwise node, and those behind it."""
        found = self._following(node.result.type.shape)
        if not found.start(node):
            raise NotLowered.at(node)
        found.follow(node.result)
        return self._chained(found)

    def goes_by_row(self, chain: Chain) -> bool:
        """Whether it reads rows as they were made elsewhere, a row to a lane; then it goes on so, since such rows may
        stay where they are."""
        made = any(view.buffer in self._by_row and view.rank > 1 for view in chain.sources)
        if made:
            self._by_row.update(view.buffer for _, view in chain.homes)
        return made

    def _following(self, shape: tuple[int, ...]) -> Following:
        return Following(shape, self.places, self._reading, self._meets_in_pieces, self._waiting.nodes)

    def _meets_in_pieces(self, node: Node, shape: tuple[int, ...]) -> bool:
        rows, width = prod(shape[:-1]), shape[-1] if shape else 1
        degree = node.op.degree if isinstance(node.op, AllReduce) else 0
        dtype = on_device(node.result.type.dtype)
        return degree == self.ranks and rows * width > 0 and pays_in_pieces(self.k.core, rows, width, dtype)

    def _chained(self, found: Following, read_here: Sequence[Node] = ()) -> Chain:
        done, stored = found.finished(read_here)
        self._done.update(done)
        found.sources = [self._in_runs(view) for view in found.sources]
        return chained(found, [(value, self._home_in(value, found.shape)) for value in stored])

    def _home_in(self, value: Value, shape: tuple[int, ...]) -> View:
        """As `home`, of a result that is made in pieces of this shape: what only becomes a part of a concatenation is
        written where that will be."""
        home = self._home_of_pieces(value, shape)
        if len(shape) == 2 and shape[-1] == value.type.shape[-1]:
            self._by_row.add(home.buffer)
        return home

    def _home_of_pieces(self, value: Value, shape: tuple[int, ...]) -> View:
        homes = self.places.homes
        whole = self.only(value)
        if whole is not None and isinstance(whole.op, Concat):
            if whole.result not in homes:
                homes[whole.result] = self.scratch(value.type.dtype, whole.result.type.shape)
            place = laid_out(homes[whole.result], whole)[whole.operands.index(value)]
            if place.reshaped(shape) is not None:
                homes[value] = place
        return self.home(value)

    def _in_runs(self, view: View) -> View:
        """A view whose pieces do not come one element at a time, if turning it all at once prevents that."""
        (flat,) = view.merged()
        turned = turned_axis(replace(flat, offset=Affine(), strides=packed(flat.shape)), flat)
        return view if turned is None else self.packed(view)

    def updated(self, node: Node) -> View:
        """Where the result of a node that changes a part of its first operand is to be: there is a copy of the operand,
        or, where nobody reads that any more, the operand itself."""
        old, homes = node.operands[0], self.places.homes
        source = self.view(old)
        own = old in self.places.states.values() or homes.get(old) == source
        if node.result not in homes and own and self._lifetimes.is_last(old, node):
            homes[node.result] = source
        home = self.home(node.result)
        if home != source:
            self.copy(home, source)
        return home

    def number(self, value: Value) -> float | None:
        """Of a constant with one element, as it would lie on the device."""
        return self.places.number(value)

    # Copies in HBM

    def packed(self, view: View) -> View:
        """The same elements, row by row."""
        return view if view.is_contiguous else self.copied(view)

    def copied(self, view: View) -> View:
        """In room of its own, row by row."""
        made = self.scratch(view.dtype, view.shape)
        self.copy(made, view)
        return made

    def copy(self, dst: View, src: View) -> None:
        """From HBM to HBM, element by element; the types may differ."""
        if not dst.elements:
            return
        to, source = dst.merged([src])
        axis = turned_axis(to, source)
        if axis is not None:
            copy_turned(self.k, to, source, axis)
            return
        outer = max(to.rank - 4, 0)
        self._copy_inside(to, source, outer)

    def _copy_inside(self, dst: View, src: View, outer: int) -> None:
        if not outer:
            self.k.copy(dst.far(), src.far())
            return
        with self.k.loop(dst.shape[0]) as turn:
            self._copy_inside(dst.pick(0, turn), src.pick(0, turn), outer - 1)


def laid_out(whole: View, node: Node) -> list[View]:
    """Where each operand of a concatenation lies in its result."""
    assert isinstance(node.op, Concat)
    sizes = [operand.type.shape[node.op.axis] for operand in node.operands]
    starts = accumulate(sizes[:-1], initial=0)
    before = [(0, size) for size in whole.shape[: node.op.axis]]
    return [whole.cut(*before, span) for span in zip(starts, sizes, strict=True)]
