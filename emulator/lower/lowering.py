"""Lowering context of one program: the registry of operators' lowerings, and what a lowering works with.

`LOWERINGS` maps an operator's class to the function that emits its instructions. `Lowering` gives it the kernel writer,
the views of its operands, and the location of its result.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.lower.epilogue import ElementwiseChain, Epilogue, broadcast_rows, chain_of
from nxpipe.emulator.lower.grouping import EpilogueFusion, KernelGrouping
from nxpipe.emulator.lower.hbm_buffers import Placement
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.records import PlacedGraph
from nxpipe.emulator.lower.transpose import copy_transposed, transposed_axis
from nxpipe.emulator.lower.view import View, packed
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Concat, Transpose
from nxpipe.emulator.ops.base import Operator

Kind = TypeVar("Kind", bound=Operator)
Writes: TypeAlias = Callable[["Lowering", Node, Kind], None]
LOWERINGS: dict[type[Operator], Writes[Any]] = {}


def lowers(*kinds: type[Operator]) -> Callable[[Writes[Kind]], Writes[Kind]]:
    """Register a function as the lowering of one or more operators."""

    def register(function: Writes[Kind]) -> Writes[Kind]:
        LOWERINGS.update(dict.fromkeys(kinds, function))
        return function

    return register


class NotLowered(CompileError):
    """An operator, or a form of it, that has no lowering."""

    @classmethod
    def at(cls, node: Node) -> "NotLowered":
        place = str(node.origin) or "an unknown place"
        return cls(f"cannot lower {node.op.label} at {place}: the back end does not support it")


class Lowering:
    """`k` emits instructions, `groups` decides which nodes share a kernel, `places` holds the locations of values."""

    def __init__(self, placed: PlacedGraph) -> None:
        self.ranks = placed.target.ranks
        self.k = Kernel(CORES[placed.target.core])
        self.places = Placement(placed)
        self._lifetimes = placed.liveness
        self.groups = KernelGrouping(placed, self.places, self.k)
        self._by_row: set[int] = set()  # buffers that are written a row to a lane
        self.notes: dict[str, int] = {"": 0}

    def note(self, node: Node) -> int:
        """The number of a node's place in the model, which its instructions carry."""
        return self.notes.setdefault(str(node.origin), len(self.notes))

    def view(self, value: Value) -> View:
        """The view of a value in its own type; a value that is stored narrower is widened by a copy."""
        view, dtype = self.stored_view(value), value.type.dtype.on_device
        if view.dtype is not dtype:
            self.places.views[value] = self.scratch(dtype, view.shape)
            self.copy(self.places.views[value], view)
        return self.places.views[value]

    def stored_view(self, value: Value) -> View:
        """The view of a value in the type in which it is stored. The result of an exact cast is stored in its operand's
        type, and readers widen it as they load it."""
        return self.places.views[value]

    def home(self, value: Value) -> View:
        """The contiguous location to which a node's result is written."""
        homes = self.places.homes
        if value not in homes:
            homes[value] = self.scratch(value.type.dtype, value.type.shape)
        self.places.views[value] = homes[value]
        return homes[value]

    def transposable_home(self, value: Value) -> View:
        """The location of a result that can be written in any order of axes: if its one reader is a transpose, the
        result is written transposed, to the location of the transpose's result."""
        transpose = self.groups.only_reader(value)
        if transpose is None or not isinstance(transpose.op, Transpose):
            return self.home(value)
        self.groups.fuse([transpose.result])
        back = tuple(transpose.op.order.index(axis) for axis in range(value.type.rank))
        self.places.views[value] = self.home(transpose.result).transposed(back)
        return self.stored_view(value)

    def constant(self, data: Array, dtype: DType) -> View:
        return self.places.constant(data, dtype)

    def rank(self) -> View:
        return self.places.rank()

    def scratch(self, dtype: Any, shape: tuple[int, ...]) -> View:
        return self.places.scratch(dtype, shape)

    def alias(self, value: Value, view: View) -> None:
        """Make a value a view of existing data; copy the data if the value has a location of its own."""
        home = self.places.homes.get(value)
        if home is not None:
            self.copy(home, view)
        self.places.views[value] = home or view

    # Elementwise nodes

    def epilogue(self, result: Value, width: int) -> Epilogue:
        """The epilogue of a node whose result is computed as a matrix with rows of this width."""
        return self.fuse_epilogue(self.groups.epilogue(result, width), result)

    def fuse_epilogue(self, found: EpilogueFusion, result: Value, read_here: Sequence[Node] = ()) -> Epilogue:
        """Commit to an epilogue; `read_here` are nodes of this kernel that read its tiles from SBUF."""
        chain = self._chained(found, read_here)
        return Epilogue(self.k, result, replace(chain, kept=broadcast_rows(self.k, chain.sources)))

    def chain(self, node: Node) -> ElementwiseChain:
        """An elementwise node with its epilogue."""
        found = self.groups.elementwise(node)
        if found is None:
            raise NotLowered.at(node)
        return self._chained(found)

    def goes_by_row(self, chain: ElementwiseChain) -> bool:
        """True if a chain reads rows that a kernel has written one row to a lane. The chain then writes its rows so
        too, because only such buffers can be promoted to SBUF."""
        made = any(view.buffer in self._by_row and view.rank > 1 for view in chain.sources)
        if made:
            self._by_row.update(view.buffer for _, view in chain.homes)
        return made

    def _chained(self, found: EpilogueFusion, read_here: Sequence[Node] = ()) -> ElementwiseChain:
        done, stored = found.finished(read_here)
        self.groups.fuse(done)
        found.sources = [self._in_runs(view) for view in found.sources]
        return chain_of(found, [(value, self._home_in(value, found.shape)) for value in stored])

    def _home_in(self, value: Value, shape: tuple[int, ...]) -> View:
        """The location of a result that is written in pieces of this shape."""
        home = self._home_of_pieces(value, shape)
        if len(shape) == 2 and shape[-1] == value.type.shape[-1]:
            self._by_row.add(home.buffer)
        return home

    def _home_of_pieces(self, value: Value, shape: tuple[int, ...]) -> View:
        homes = self.places.homes
        whole = self.groups.only_reader(value)
        if whole is not None and isinstance(whole.op, Concat):
            if whole.result not in homes:
                homes[whole.result] = self.scratch(value.type.dtype, whole.result.type.shape)
            place = operand_views(homes[whole.result], whole)[whole.operands.index(value)]
            if place.reshaped(shape) is not None:
                homes[value] = place
        return self.home(value)

    def _in_runs(self, view: View) -> View:
        """A view with contiguous runs: where each piece would be loaded one element at a time, the whole is transposed
        in HBM first."""
        (flat,) = view.merged()
        transposed = transposed_axis(replace(flat, offset=Affine(), strides=packed(flat.shape)), flat)
        return view if transposed is None else self.packed(view)

    def updated(self, node: Node) -> View:
        """The location of the result of an update. If nothing reads the first operand later, that is the operand
        itself, updated in place, as a KV cache is; otherwise a copy of it."""
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
        """The number of a constant with one element; None for any other value."""
        return self.places.number(value)

    # Copies in HBM

    def packed(self, view: View) -> View:
        """A contiguous view of the same elements."""
        return view if view.is_contiguous else self.copied(view)

    def copied(self, view: View) -> View:
        """A contiguous copy in scratch."""
        made = self.scratch(view.dtype, view.shape)
        self.copy(made, view)
        return made

    def copy(self, dst: View, src: View) -> None:
        """Copy in HBM, element by element; the types may differ."""
        if not dst.elements:
            return
        to, source = dst.merged([src])
        axis = transposed_axis(to, source)
        if axis is not None:
            copy_transposed(self.k, to, source, axis)
            return
        outer = max(to.rank - 4, 0)
        self._copy_inside(to, source, outer)

    def _copy_inside(self, dst: View, src: View, outer: int) -> None:
        if not outer:
            self.k.copy(dst.far(), src.far())
            return
        with self.k.loop(dst.shape[0]) as index:
            self._copy_inside(dst.pick(0, index), src.pick(0, index), outer - 1)


def operand_views(whole: View, node: Node) -> list[View]:
    """The views of a concatenation's operands in its result."""
    assert isinstance(node.op, Concat)
    sizes = [operand.type.shape[node.op.axis] for operand in node.operands]
    starts = accumulate(sizes[:-1], initial=0)
    before = [(0, size) for size in whole.shape[: node.op.axis]]
    return [whole.cut(*before, span) for span in zip(starts, sizes, strict=True)]
