"""The text of one StableHLO function: a method for each opcode that emissions use, and `custom_call` for probes.

The methods are the opcodes that producers known to compile with neuronx-cc emit (docs/reference/hlo.md). Each computes
its result's type, so that the text has explicit types everywhere. Element types are those of MLIR: `i32` is signed,
`ui32` unsigned, `i1` a truth value.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array

# The element type of each type on the device, which has no 64-bit integers; tfloat32 is stored as a float32 word.
ELEMENTS: Final = {
    DType.FLOAT32: "f32",
    DType.TFLOAT32: "f32",
    DType.BFLOAT16: "bf16",
    DType.FLOAT16: "f16",
    DType.FLOAT8_E5M2: "f8E5M2",
    DType.FLOAT8_E4M3: "f8E4M3",
    DType.FLOAT8_E4M3FN: "f8E4M3FN",
    DType.UINT64: "ui32",
    DType.UINT32: "ui32",
    DType.UINT16: "ui16",
    DType.UINT8: "ui8",
    DType.INT64: "i32",
    DType.INT32: "i32",
    DType.INT16: "i16",
    DType.INT8: "i8",
    DType.BOOL: "i1",
}
_STORED: Final = {element: dtype.on_device.stored for dtype, element in ELEMENTS.items()} | {"i1": np.dtype(np.bool_)}

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the function: its name, and its type."""

    name: str
    shape: Shape
    element: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return "f" in self.element

    @property
    def type(self) -> str:
        return type_text(self.shape, self.element)

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type of an element."""
        return _STORED[self.element]


def type_text(shape: Shape, element: str) -> str:
    return f"tensor<{''.join(f'{size}x' for size in shape)}{element}>"


class HloWriter:
    """The body of a function, line by line. Values are numbered in order of definition, so equal calls give equal
    text."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._count = 0
        self._scalars: dict[tuple[str, bytes], Tensor] = {}

    def lines(self) -> Iterator[str]:
        return iter(self._lines)

    def _define(self, operation: str, shape: Shape, element: str) -> Tensor:
        result = Tensor(f"%{self._count}", shape, element)
        self._count += 1
        self._lines.append(f"    {result.name} = {operation}\n")
        return result

    def _generic(
        self, opcode: str, attributes: str, operands: Sequence[Tensor], shape: Shape, region: str = ""
    ) -> Tensor:
        """An operation in MLIR's generic form; the result has the element type of the first operand."""
        names = ", ".join(operand.name for operand in operands)
        types = ", ".join(operand.type for operand in operands)
        element = operands[0].element
        body = f" ({{{region}}})" if region else ""
        text = f'"stablehlo.{opcode}"({names}) <{{{attributes}}}>{body} : ({types}) -> {type_text(shape, element)}'
        return self._define(text, shape, element)

    # Constants

    def scalar(self, number: float, element: str) -> Tensor:
        """A number of rank 0; equal numbers are one value."""
        bits = np.asarray(number).astype(_STORED[element]).tobytes()
        if (element, bits) not in self._scalars:
            type_ = type_text((), element)
            text = f"stablehlo.constant dense<{_literal(bits, element)}> : {type_}"
            self._scalars[element, bits] = self._define(text, (), element)
        return self._scalars[element, bits]

    def filled(self, number: float, shape: Shape, element: str) -> Tensor:
        return self.broadcast(self.scalar(number, element), shape, ())

    def like(self, x: Tensor, number: float) -> Tensor:
        """A tensor of the type of `x` with one number everywhere."""
        return self.filled(number, x.shape, x.element)

    def table(self, data: Array, element: str) -> Tensor:
        """A constant. Truth values are written as bytes: a literal of i1 has no portable bytes."""
        if element == "i1":
            data = np.asarray(data)
            return self.compare("NE", *self._with(self.table(data.astype(np.uint8), "ui8"), 0))
        array = np.ascontiguousarray(data, _STORED[element]).reshape(np.shape(data))
        if array.size and not array.ndim:
            return self.scalar(array.item(), element)
        first = array.reshape(-1)[:1].tobytes()
        if array.size and array.tobytes() == first * array.size:
            return self.filled(array.flat[0], array.shape, element)
        literal = f'"0x{array.tobytes().hex().upper()}"' if array.size else ""
        text = f"stablehlo.constant dense<{literal}> : {type_text(array.shape, element)}"
        return self._define(text, array.shape, element)

    def _with(self, x: Tensor, number: float) -> tuple[Tensor, Tensor]:
        return x, self.like(x, number)

    def iota(self, shape: Shape, axis: int, element: str) -> Tensor:
        text = f"stablehlo.iota dim = {axis} : {type_text(shape, element)}"
        return self._define(text, shape, element)

    # Elementwise

    def unary(self, opcode: str, x: Tensor) -> Tensor:
        return self._define(f"stablehlo.{opcode} {x.name} : {x.type}", x.shape, x.element)

    def binary(self, opcode: str, a: Tensor, b: Tensor | float) -> Tensor:
        """`b` may be a number. Operands have one type; nothing is broadcast."""
        b = b if isinstance(b, Tensor) else self.like(a, b)
        return self._define(f"stablehlo.{opcode} {a.name}, {b.name} : {a.type}", a.shape, a.element)

    def compare(self, direction: str, a: Tensor, b: Tensor | float) -> Tensor:
        """EQ, NE, LT, LE, GT or GE. Comparisons with NaN are false, but for NE."""
        b = b if isinstance(b, Tensor) else self.like(a, b)
        kind = "FLOAT" if a.is_float else "UNSIGNED" if a.element[0] == "u" or a.element == "i1" else "SIGNED"
        types = f"({a.type}, {b.type}) -> {type_text(a.shape, 'i1')}"
        return self._define(f"stablehlo.compare {direction}, {a.name}, {b.name}, {kind} : {types}", a.shape, "i1")

    def select(self, condition: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        """One of the two may be a number."""
        if not isinstance(a, Tensor):
            assert isinstance(b, Tensor)
            a = self.like(b, a)
        b = b if isinstance(b, Tensor) else self.like(a, b)
        names = f"{condition.name}, {a.name}, {b.name}"
        return self._define(f"stablehlo.select {names} : {condition.type}, {a.type}", a.shape, a.element)

    def convert(self, x: Tensor, element: str) -> Tensor:
        """Between floats to nearest even; between integers with wrap-around; of truth values as 0 and 1."""
        if x.element == element:
            return x
        return self._define(
            f"stablehlo.convert {x.name} : ({x.type}) -> {type_text(x.shape, element)}", x.shape, element
        )

    def bitcast(self, x: Tensor, shape: Shape, element: str) -> Tensor:
        """The same bits as another element type; a shorter element adds a last axis, a longer one removes it."""
        types = f"({x.type}) -> {type_text(shape, element)}"
        return self._define(f"stablehlo.bitcast_convert {x.name} : {types}", shape, element)

    # Movement

    def copy(self, x: Tensor) -> Tensor:
        return self._define(f"mhlo.copy {x.name} : {x.type}", x.shape, x.element)

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        if x.shape == shape:
            return x
        text = f"stablehlo.reshape {x.name} : ({x.type}) -> {type_text(shape, x.element)}"
        return self._define(text, shape, x.element)

    def transpose(self, x: Tensor, order: Sequence[int]) -> Tensor:
        if list(order) == list(range(x.rank)):
            return x
        shape = tuple(x.shape[axis] for axis in order)
        text = f"stablehlo.transpose {x.name}, dims = {list(order)} : ({x.type}) -> {type_text(shape, x.element)}"
        return self._define(text, shape, x.element)

    def broadcast(self, x: Tensor, shape: Shape, axes: Sequence[int]) -> Tensor:
        """Axis i of `x` becomes axis `axes[i]` of the result; an axis of size 1 is repeated."""
        if x.shape == shape and list(axes) == list(range(x.rank)):
            return x
        types = f"({x.type}) -> {type_text(shape, x.element)}"
        return self._define(f"stablehlo.broadcast_in_dim {x.name}, dims = {list(axes)} : {types}", shape, x.element)

    def expanded(self, x: Tensor, shape: Shape) -> Tensor:
        """Broadcast by numpy's rule: axes are aligned at the end."""
        return self.broadcast(x, shape, range(len(shape) - x.rank, len(shape)))

    def slice(self, x: Tensor, starts: Shape, stops: Shape, steps: Shape | None = None) -> Tensor:
        steps = steps or (1,) * x.rank
        bounds = list(zip(starts, stops, steps, strict=True))
        shape = tuple((stop - start + step - 1) // step for start, stop, step in bounds)
        if shape == x.shape:
            return x
        window = ", ".join(f"{start}:{stop}:{step}" for start, stop, step in bounds)
        text = f"stablehlo.slice {x.name} [{window}] : ({x.type}) -> {type_text(shape, x.element)}"
        return self._define(text, shape, x.element)

    def part(self, x: Tensor, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
        """A slice of one axis."""
        starts, stops, steps = [0] * x.rank, list(x.shape), [1] * x.rank
        starts[axis], stops[axis], steps[axis] = start, stop, step
        return self.slice(x, tuple(starts), tuple(stops), tuple(steps))

    def pad(
        self, x: Tensor, number: Tensor | float, before: Shape, after: Shape, between: Shape | None = None
    ) -> Tensor:
        """Surrounded by copies of a scalar, and with so many between elements; a negative padding crops."""
        between = between or (0,) * x.rank
        if not any((*before, *after, *between)):
            return x
        scalar = number if isinstance(number, Tensor) else self.scalar(number, x.element)
        rows = zip(before, x.shape, after, between, strict=True)
        shape = tuple(b + size + a + max(size - 1, 0) * gap for b, size, a, gap in rows)
        sizes = f"low = {list(before)}, high = {list(after)}, interior = {list(between)}"
        types = f"({x.type}, {scalar.type}) -> {type_text(shape, x.element)}"
        return self._define(f"stablehlo.pad {x.name}, {scalar.name}, {sizes} : {types}", shape, x.element)

    def concatenate(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        shape = (*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :])
        names, types = (", ".join(items) for items in ([p.name for p in parts], [p.type for p in parts]))
        text = f"stablehlo.concatenate {names}, dim = {axis} : ({types}) -> {type_text(shape, first.element)}"
        return self._define(text, shape, first.element)

    def reverse(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        if not axes:
            return x
        return self._define(f"stablehlo.reverse {x.name}, dims = {list(axes)} : {x.type}", x.shape, x.element)

    def dynamic_slice(self, x: Tensor, axis: int, start: Tensor, size: int) -> Tensor:
        """`size` elements of an axis from an i32 scalar on."""
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        starts = [start if at == axis else self.scalar(0, "i32") for at in range(x.rank)]
        names, types = (", ".join(items) for items in ([s.name for s in starts], [s.type for s in starts]))
        text = f"stablehlo.dynamic_slice {x.name}, {names}, sizes = {list(shape)} : ({x.type}, {types}) -> "
        return self._define(text + type_text(shape, x.element), shape, x.element)

    def update_slice(self, x: Tensor, update: Tensor, starts: Shape) -> Tensor:
        """`x` with a window replaced, at constant places."""
        return self.update_at(x, update, [self.scalar(start, "i32") for start in starts])

    def update_at(self, x: Tensor, update: Tensor, places: Sequence[Tensor]) -> Tensor:
        """`x` with a window replaced, from i32 scalars on."""
        if not x.rank:
            return update
        names, types = (", ".join(items) for items in ([p.name for p in places], [p.type for p in places]))
        text = f"stablehlo.dynamic_update_slice {x.name}, {update.name}, {names} : ({x.type}, {update.type}, {types})"
        return self._define(f"{text} -> {x.type}", x.shape, x.element)

    def gather(self, table: Tensor, indices: Tensor, axes: Sequence[int], position: int) -> Tensor:
        """Elements at computed places. The last axis of `indices` holds one index for each of `axes`; the other axes of
        `indices` replace `axes`, at `position` among the remaining axes of the table."""
        common, kept = indices.shape[:-1], [axis for axis in range(table.rank) if axis not in axes]
        offsets = [at if at < position else at + len(common) for at in range(len(kept))]
        sizes = [1 if axis in axes else size for axis, size in enumerate(table.shape)]
        remaining = tuple(table.shape[axis] for axis in kept)
        numbers = f"offset_dims = {offsets}, collapsed_slice_dims = {list(axes)}, start_index_map = {list(axes)}"
        attributes = (
            f"dimension_numbers = #stablehlo.gather<{numbers}, index_vector_dim = {len(common)}>, "
            f"indices_are_sorted = false, slice_sizes = {_integers(sizes)}"
        )
        shape = remaining[:position] + common + remaining[position:]
        return self._generic("gather", attributes, (table, indices), shape)

    def scatter(
        self, x: Tensor, indices: Tensor, update: Tensor, axes: Sequence[int], position: int, opcode: str = ""
    ) -> Tensor:
        """The inverse of `gather`: elements replaced by those of the update, or combined with them by an opcode."""
        common = indices.rank - 1
        windows = [at if at < position else at + common for at in range(x.rank - len(axes))]
        numbers = f"update_window_dims = {windows}, inserted_window_dims = {list(axes)}"
        attributes = (
            f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}, scatter_dims_to_operand_dims = {list(axes)}, "
            f"index_vector_dim = {common}>, indices_are_sorted = false, unique_indices = false"
        )
        return self._generic("scatter", attributes, (x, indices, update), x.shape, _region(opcode, x.element))

    # Contractions

    def dot(
        self,
        a: Tensor,
        b: Tensor,
        batch: tuple[Sequence[int], Sequence[int]],
        inner: tuple[int, int],
        element: str = "f32",
    ) -> Tensor:
        """Products summed over one axis of each operand: [batch, remaining of `a`, remaining of `b`]."""
        rest = [
            tuple(size for axis, size in enumerate(x.shape) if axis not in (*own, contracted))
            for x, own, contracted in zip((a, b), batch, inner, strict=True)
        ]
        shape = (*(a.shape[axis] for axis in batch[0]), *rest[0], *rest[1])
        batching = f"batching_dims = {list(batch[0])} x {list(batch[1])}, " if batch[0] else ""
        contracting = f"contracting_dims = [{inner[0]}] x [{inner[1]}]"
        types = f"({a.type}, {b.type}) -> {type_text(shape, element)}"
        return self._define(
            f"stablehlo.dot_general {a.name}, {b.name}, {batching}{contracting} : {types}", shape, element
        )

    def convolution(
        self, x: Tensor, weight: Tensor, positions: Shape, stride: Shape, dilation: Shape, groups: int
    ) -> Tensor:
        """Products summed in float32 over windows of x [batch, channels, position ...], without padding."""
        axes = ", ".join(str(axis) for axis in range(x.rank - 2))
        shape = (x.shape[0], weight.shape[0], *positions)
        attributes = (
            f"window_strides = {_integers(stride)}, padding = dense<0> : tensor<{x.rank - 2}x2xi64>, "
            f"lhs_dilation = {_integers((1,) * (x.rank - 2))}, rhs_dilation = {_integers(dilation)}, "
            f"dimension_numbers = #stablehlo.conv<[b, f, {axes}]x[o, i, {axes}]->[b, f, {axes}]>, "
            f"feature_group_count = {groups} : i64, batch_group_count = 1 : i64"
        )
        types = f"({x.type}, {weight.type}) -> {type_text(shape, 'f32')}"
        return self._define(
            f'"stablehlo.convolution"({x.name}, {weight.name}) <{{{attributes}}}> : {types}', shape, "f32"
        )

    def reduce(self, opcode: str, x: Tensor, axes: Sequence[int], initial: float) -> Tensor:
        """One operand folded over whole axes."""
        if not axes:
            return x
        shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
        start = self.scalar(initial, x.element)
        types = f"({x.type}, {start.type}) -> {type_text(shape, x.element)}"
        text = f"stablehlo.reduce({x.name} init: {start.name}) applies stablehlo.{opcode} across dimensions = "
        return self._define(f"{text}{list(axes)} : {types}", shape, x.element)

    def reduced(self, opcode: str, x: Tensor, axes: Sequence[int], initial: float) -> Tensor:
        """The fold of `reduce`, repeated over the folded axes."""
        kept = [axis for axis in range(x.rank) if axis not in axes]
        return self.broadcast(self.reduce(opcode, x, axes, initial), x.shape, kept)

    # Collectives; all ranks are one group

    def all_reduce(self, x: Tensor, degree: int) -> Tensor:
        return self._generic("all_reduce", _groups(degree), (x,), x.shape, _region("add", x.element))

    def all_gather(self, x: Tensor, axis: int, degree: int) -> Tensor:
        shape = (*x.shape[:axis], x.shape[axis] * degree, *x.shape[axis + 1 :])
        return self._generic("all_gather", f"all_gather_dim = {axis} : i64, {_groups(degree)}", (x,), shape)

    def reduce_scatter(self, x: Tensor, axis: int, degree: int) -> Tensor:
        shape = (*x.shape[:axis], x.shape[axis] // degree, *x.shape[axis + 1 :])
        attributes = f"scatter_dimension = {axis} : i64, {_groups(degree)}"
        return self._generic("reduce_scatter", attributes, (x,), shape, _region("add", x.element))

    # Custom calls, which probes ask about and no emission writes

    def custom_call(
        self, target: str, operands: Sequence[Tensor], results: Sequence[tuple[Shape, str]], config: str
    ) -> list[Tensor]:
        """The results of a call to what the compiler has under a name, by their types."""
        names = ", ".join(operand.name for operand in operands)
        taken = ", ".join(operand.type for operand in operands)
        given = ", ".join(type_text(*result) for result in results)
        number = f"%{self._count}"
        count = f":{len(results)}" if len(results) > 1 else ""
        self._count += 1
        call = f'stablehlo.custom_call @{target}({names}) {{backend_config = "{config}"}}'
        self._lines.append(f"    {number}{count} = {call} : ({taken}) -> ({given})\n")
        parts = [f"{number}#{at}" for at in range(len(results))] if count else [number]
        return [Tensor(part, *result) for part, result in zip(parts, results, strict=True)]


def _literal(bits: bytes, element: str) -> str:
    """A number's text: the bits of a float, so that no digit is lost."""
    if element == "i1":
        return "true" if bits[0] else "false"
    if "f" in element:
        return f"0x{bits[::-1].hex().upper()}"
    return str(int.from_bytes(bits, "little", signed=element[0] == "i"))


def _integers(numbers: Sequence[int]) -> str:
    return f"array<i64: {', '.join(map(str, numbers))}>" if numbers else "array<i64>"


def _groups(degree: int) -> str:
    ranks = ", ".join(map(str, range(degree)))
    return f"replica_groups = dense<[[{ranks}]]> : tensor<1x{degree}xi64>"


def _region(opcode: str, element: str) -> str:
    """The computation of two scalars: an opcode, or the second one."""
    scalar = type_text((), element)
    work = f"%c = stablehlo.{opcode} %a, %b : {scalar}; " if opcode else ""
    lines = work.replace("; ", "\n")
    returned = "%c" if opcode else "%b"
    return f"\n    ^bb0(%a: {scalar}, %b: {scalar}):\n    {lines}    stablehlo.return {returned} : {scalar}\n    "


def elements_of(shape: Shape) -> int:
    return math.prod(shape)
