"""Lowering context of one program, and the registry of the operators' lowerings.

`LOWERINGS` maps an operator's class to the function that emits its instructions. `Lowering` gives it the kernel writer,
the views of its operands, and the location of its result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine
from nxpipe.emulator.isa.program import Role, note_of
from nxpipe.emulator.lower.epilogue import ElementwiseChain, Epilogue, broadcast_rows, chain_of
from nxpipe.emulator.lower.grouping import EpilogueFusion, KernelGrouping
from nxpipe.emulator.lower.hbm_buffers import Placement
from nxpipe.emulator.lower.kernel import PARTITIONS, Kernel
from nxpipe.emulator.lower.kernel_cost import piecewise_is_cheaper
from nxpipe.emulator.lower.records import PlacedGraph
from nxpipe.emulator.lower.transpose import copy_transposed, transposed_axis
from nxpipe.emulator.lower.view import View, packed
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Cast, Concat, Transpose
from nxpipe.emulator.ops.base import Operator

_SHORT_ROW: Final = 512  # elements: rows for which few lanes cost less than a copy in HBM
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
    """The context of lowerings: `k` emits instructions, `groups` decides which nodes share a kernel, `places` holds the
    locations of values."""

    def __init__(self, placed: PlacedGraph) -> None:
        self.ranks = placed.target.ranks
        self.k = Kernel(CORES[placed.target.core])
        self.places = Placement(placed)
        self._liveness = placed.liveness
        self.groups = KernelGrouping(placed, self.places, self.k)
        self._channels: set[int] = set()  # buffers of tensors [batch, channels, ...], written channel by channel
        self._early: set[int] = set()  # scratch written before the first loop around its readers
        self._once: dict[object, list[View]] = {}
        self._by_row: dict[int, int] = {}  # buffers whose rows are written one per partition, and their width
        self.notes: dict[str, int] = {"": 0}

    def note(self, node: Node) -> int:
        """The number of a node's place in the model and its operator, which its instructions carry."""
        return self.notes.setdefault(note_of(str(node.origin), node.op.label), len(self.notes))

    def view(self, value: Value) -> View:
        """The view of a value in its own type; a value stored in a narrower type is first copied to its own."""
        view, dtype = self.stored_view(value), value.type.dtype.on_device
        if view.dtype is not dtype:
            self.places.views[value] = self.scratch(dtype, view.shape)
            self.copy(self.places.views[value], view)
        return self.places.views[value]

    def stored_view(self, value: Value) -> View:
        """The view of a value in the type in which it is stored. The result of an exact cast is a view of its operand,
        in the operand's type; readers widen it as they load it."""
        return self.places.views[value]

    def weight(self, value: Value) -> View:
        """The view of a matmul's second operand: its tiled form, if it is a parameter that has one."""
        return self.places.weights.get(value) or self.view(value)

    def home(self, value: Value) -> View:
        """The contiguous location of a node's result."""
        homes = self.places.homes
        if value not in homes:
            homes[value] = self.scratch(value.type.dtype, value.type.shape)
        self.places.views[value] = homes[value]
        return homes[value]

    def transposable_home(self, value: Value) -> View:
        """The location of a float32 result that can be written in any order of axes. If its only reader is a cast to
        another float, the cast is fused: the kernel rounds to that type. If its only reader is a transpose, the
        transpose is fused: the result is written, transposed, to the location of the transpose's result."""
        reader = self.groups.only_reader(value)
        if reader is not None and isinstance(reader.op, Cast) and _rounds_once(value, reader.result):
            self.groups.fuse([reader.result])
            self.places.views[value] = self.transposable_home(reader.result)
            return self.stored_view(value)
        if reader is None or not isinstance(reader.op, Transpose):
            return self.home(value)
        self.groups.fuse([reader.result])
        inverse = tuple(reader.op.order.index(axis) for axis in range(value.type.rank))
        self.places.views[value] = self.home(reader.result).transposed(inverse)
        return self.stored_view(value)

    def constant(self, data: Array, dtype: DType) -> View:
        return self.places.constant(data, dtype)

    def rank(self) -> View:
        return self.places.rank()

    def scratch(self, dtype: Any, shape: tuple[int, ...]) -> View:
        view = self.places.scratch(dtype, shape)
        if not self.k.in_loop:
            self._early.add(view.buffer)
        return view

    def table_of(self, view: View) -> Array | None:
        """The elements of a constant, with an axis of size 1 where the view repeats elements; None for other values."""
        buffer = self.places.buffers.table[view.buffer]
        if buffer.role is not Role.CONSTANT or view.offset != affine(view.offset.base):
            return None
        data = np.frombuffer(self.places.constants[buffer.names[0]], buffer.dtype.stored)
        shape = tuple(size if stride else 1 for size, stride in zip(view.shape, view.strides, strict=True))
        strides = tuple(stride * data.itemsize for stride in view.strides)
        return np.lib.stride_tricks.as_strided(data[view.offset.base :], shape, strides, writeable=False)

    @contextmanager
    def once(self, key: object, sources: Sequence[View]) -> Iterator[list[View]]:
        """Compute a view of these sources once, if no loop and no later update changes them. The list has the view if
        it exists; otherwise the caller computes and appends it, and the instructions are emitted before all loops."""
        if not all(map(self._is_invariant, sources)):
            yield []
        elif key in self._once:
            yield self._once[key]
        else:
            with self.k.before_loops():
                self._once[key] = []
                yield self._once[key]

    def _is_invariant(self, view: View) -> bool:
        if view.offset != affine(view.offset.base):
            return False
        role = self.places.buffers.table[view.buffer].role
        return role in (Role.INPUT, Role.CONSTANT) or (view.buffer in self._early and self.k.in_loop)

    def alias(self, value: Value, view: View) -> None:
        """Make a value a view of existing data, or copy the data if the value has a required location."""
        home = self.places.homes.get(value)
        if home is not None:
            self.copy(home, view)
        self.places.views[value] = home or view

    # Elementwise nodes

    def epilogue(self, result: Value, width: int) -> Epilogue:
        """Fuse and return the epilogue of a node whose result is computed as a matrix with rows of `width` elements."""
        return self.fuse_epilogue(self.groups.epilogue(result, width), result)

    def channel_epilogue(self, result: Value) -> Epilogue:
        """Fuse and return the epilogue of a node whose result is computed channel by channel. The result is stored in
        that order, unless it has a location already."""
        return Epilogue(self.k, result, self._commit(self.groups.channel_epilogue(result)))

    def fuse_epilogue(self, fusion: EpilogueFusion, result: Value, kernel_readers: Sequence[Node] = ()) -> Epilogue:
        """Commit to an epilogue. `kernel_readers` are nodes of this kernel that read its tiles from SBUF."""
        chain = self._commit(fusion, kernel_readers)
        return Epilogue(self.k, result, replace(chain, resident=broadcast_rows(self.k, chain.sources)))

    def chain(self, node: Node) -> ElementwiseChain:
        """Fuse and return the chain of an elementwise node with its epilogue."""
        fusion = self.groups.elementwise(node, any(map(self.by_channel, self._of_its_shape(node))))
        if fusion is None:
            raise NotLowered.at(node)
        return self._commit(fusion)

    def stored_like(self, view: View, other: View) -> None:
        """Note that a view will be written as another one is."""
        if other.buffer in self._channels:
            self._channels.add(view.buffer)

    def by_channel(self, value: Value) -> bool:
        """True if a kernel has written a tensor [batch, channels, position ...] channel by channel."""
        view = self.places.views.get(value)
        return value.type.rank > 2 and view is not None and view.buffer in self._channels

    def _of_its_shape(self, node: Node) -> list[Value]:
        return [operand for operand in node.operands if operand.type.shape == node.result.type.shape]

    def row_axes(self, chain: ElementwiseChain) -> tuple[int, ...] | None:
        """The axes of a chain's views along which partitions differ, if it reads rows that a kernel has written one per
        partition, or if its own rows are few and short. The chain then writes its rows in the same layout, because only
        such buffers can be promoted to SBUF."""
        candidates = [(view, self._by_row[view.buffer]) for view in chain.sources if view.buffer in self._by_row]
        home = next((view for _, view in chain.homes if view.rank > 1), None)
        if not candidates and home is not None and home.elements // max(home.shape[-1], 1) < PARTITIONS:
            candidates = [(home, home.shape[-1])] if home.shape[-1] <= _SHORT_ROW else []
        for view, width in candidates:
            if view.rank < 2:
                continue
            axes = [axis for axis, size in enumerate(view.shape) if size > 1 and abs(view.strides[axis]) >= width]
            inner = prod(size for axis, size in enumerate(view.shape) if axis not in axes)
            if not axes and inner > width:
                continue  # rows that were written one per partition are read as one row, or repeated
            self._by_row.update(dict.fromkeys((home.buffer for _, home in chain.homes), inner))
            return tuple(axes)
        return None

    def is_by_row(self, view: View) -> bool:
        """True if the rows of a matrix are written one per partition. Of a loop-carried value, whose kernel follows, it
        is assumed of matmuls' results, unless ranks exchange them in HBM."""
        rows, width = view.shape
        if view.buffer in self._by_row:
            return self._by_row[view.buffer] == width
        return self.ranks == 1 or piecewise_is_cheaper(self.k.core, self.ranks, rows, width, DType.FLOAT32)

    def _commit(self, fusion: EpilogueFusion, kernel_readers: Sequence[Node] = ()) -> ElementwiseChain:
        done, stored = fusion.finished(kernel_readers)
        self.groups.fuse(done)
        fusion.sources = [self._with_contiguous_runs(view) for view in fusion.sources]
        return chain_of(fusion, [(value, self._home_in(value, fusion)) for value in stored], kernel_readers)

    def _home_in(self, value: Value, fusion: EpilogueFusion) -> View:
        """The location of a result that is written in tiles of a tensor of the fusion's shape."""
        home = self._concat_home(value, fusion)
        if fusion.by_channel:
            self._channels.add(home.buffer)
        elif len(fusion.shape) == 2 and fusion.shape[-1] == value.type.shape[-1]:
            self._by_row[home.buffer] = fusion.shape[-1]
        return home

    def _concat_home(self, value: Value, fusion: EpilogueFusion) -> View:
        homes = self.places.homes
        concat = self.groups.only_reader(value)
        if concat is not None and isinstance(concat.op, Concat):
            if concat.result not in homes:
                homes[concat.result] = self._stored(value.type.dtype, concat.result.type.shape, fusion.swaps)
            part = operand_views(homes[concat.result], concat)[concat.operands.index(value)]
            if fusion.arranged(part) is not None:
                homes[value] = part
        if value not in homes:
            homes[value] = self._stored(value.type.dtype, value.type.shape, fusion.swaps)
        return self.home(value)

    def _stored(self, dtype: Any, shape: tuple[int, ...], swaps: bool) -> View:
        """Scratch for a tensor, with its first two axes swapped."""
        if not swaps:
            return self.scratch(dtype, shape)
        swapped = (1, 0, *range(2, len(shape)))
        return self.scratch(dtype, tuple(shape[axis] for axis in swapped)).transposed(swapped)

    def _with_contiguous_runs(self, view: View) -> View:
        """The view, or a contiguous copy of it if its tiles would be loaded one element at a time; the copy is
        transposed in HBM."""
        (flat,) = view.merged()
        transposed = transposed_axis(replace(flat, offset=Affine(), strides=packed(flat.shape)), flat)
        return view if transposed is None else self.packed(view)

    def updated(self, node: Node) -> View:
        """The location of the result of an update: the first operand's own, updated in place like a KV cache, if the
        operand has no later reader; otherwise a copy of the operand."""
        state, homes = node.operands[0], self.places.homes
        source = self.view(state)
        is_state = state in self.places.states.values() or homes.get(state) == source
        if node.result not in homes and is_state and self._liveness.is_last(state, node):
            homes[node.result] = source
        home = self.home(node.result)
        if home != source:
            self.copy(home, source)
        self._early.discard(home.buffer)
        return home

    def number(self, value: Value) -> float | None:
        """The element of a one-element constant; None for any other value."""
        return self.places.number(value)

    # Copies in HBM

    def packed(self, view: View) -> View:
        """A contiguous view of the same elements."""
        return view if view.is_contiguous else self.copied(view)

    def copied(self, view: View) -> View:
        """A contiguous copy in scratch."""
        copy = self.scratch(view.dtype, view.shape)
        self.copy(copy, view)
        return copy

    def copy(self, dst: View, src: View) -> None:
        """Copy in HBM, element by element; the types may differ."""
        if not dst.elements:
            return
        target, source = dst.merged([src])
        axis = transposed_axis(target, source)
        if axis is not None:
            copy_transposed(self.k, target, source, axis)
            return
        outer = max(target.rank - 4, 0)
        self._copy_inside(target, source, outer)

    def _copy_inside(self, dst: View, src: View, outer: int) -> None:
        if not outer:
            self.k.copy(dst.far(), src.far())
            return
        with self.k.loop(dst.shape[0]) as index:
            self._copy_inside(dst.pick(0, index), src.pick(0, index), outer - 1)


def _rounds_once(value: Value, cast: Value) -> bool:
    """True if a kernel that computes a value in float32 may store its cast instead."""
    return value.type.dtype is DType.FLOAT32 and cast.type.dtype.is_float


def operand_views(whole: View, node: Node) -> list[View]:
    """The views of a concatenation's operands in its result."""
    assert isinstance(node.op, Concat)
    sizes = [operand.type.shape[node.op.axis] for operand in node.operands]
    starts = accumulate(sizes[:-1], initial=0)
    before = [(0, size) for size in whole.shape[: node.op.axis]]
    return [whole.cut(*before, span) for span in zip(starts, sizes, strict=True)]
