"""What the instructions of the vector, scalar and GpSimd engines take: their sections of docs/isa.md as rules."""

from collections.abc import Callable, Mapping
from math import isfinite, isnan
from typing import Any, Final

import ml_dtypes
import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa import instructions as isa
from nxpipe.emulator.isa.faults import Breaches, Broken, Rule
from nxpipe.emulator.isa.instructions import Alu, Engine, Function, Instruction
from nxpipe.emulator.isa.kinds import (
    ACROSS_PARTITIONS,
    BINARY,
    BITS,
    COMPARISONS,
    MOST_STATISTICS,
    PREDICATES,
    REDUCTIONS,
    SEARCHED,
)
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.places import Room
from nxpipe.emulator.isa.shapes import bits, column, equal, one_in_sbuf, operator, same_type, sized, typed, unequal

_LARGEST: Final = {
    dtype: float(ml_dtypes.finfo(dtype.stored).max)  # type: ignore[no-untyped-call]
    for dtype in DType
    if dtype.is_float
}


def _activation(it: isa.Activation, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "src", it.src)
    yield from column("scale", it.scale, it.src)
    yield from column("bias", it.bias, it.src)
    yield from column("total", it.total, it.src)
    if isinstance(it.scale, Tile):
        yield from typed("scale", it.scale, (DType.FLOAT32,))
    if isinstance(it.bias, Tile) and it.bias.dtype is DType.TFLOAT32:
        yield Broken(Rule.DTYPE, "bias is tfloat32", "use float32")
    if room.core.nki_gen > 2 or it.bias == 0.0:
        return
    if isinstance(it.bias, float | int):
        yield Broken(
            Rule.GENERATION, f"bias is the number {it.bias} on {room.core.name}", "give it as a column in SBUF"
        )
    if it.function is Function.RECIPROCAL:
        yield Broken(Rule.GENERATION, f"reciprocal has a bias on {room.core.name}", "add it before")


def _tensor_tensor(it: isa.TensorTensor, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "left", it.left)
    yield from equal("left", it.left, "right", it.right)
    yield from one_in_sbuf("left", it.left, "right", it.right)
    yield from operator("op", it.op, BINARY)
    yield from bits(it, it.op)
    if it.op is Alu.POWER and it.engine is not Engine.GPSIMD:
        yield Broken(Rule.OPERATOR, f"{it.engine} raises no tensor to the power of another", "give it to gpsimd")


def _tensor_scalar(it: isa.TensorScalar, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "src", it.src)
    yield from column("operand0", it.operand0, it.src)
    yield from column("operand1", it.operand1, it.src)
    if it.op1 is not None and (it.op0 in BITS) != (it.op1 in BITS):
        yield Broken(Rule.OPERATOR, f"op0 is {it.op0} and op1 is {it.op1}", "both are bit operators, or none is")
    yield from bits(it, it.op0, it.op1)
    if it.engine is Engine.GPSIMD and (it.op0 is not Alu.RSQRT or it.op1 is not None):
        yield Broken(Rule.OPERATOR, f"op0 is {it.op0} on gpsimd", "it takes rsqrt alone; give it to vector")
    if it.engine is Engine.SCALAR and room.core.nki_gen < 4:
        legal = ((Alu.MULTIPLY, Alu.ADD), (Alu.MULTIPLY, None), (Alu.ADD, None))
        if (it.op0, it.op1) not in legal or it.reverse0 or it.reverse1:
            yield Broken(
                Rule.OPERATOR,
                f"op0 is {it.op0} and op1 is {it.op1 or 'none'} on scalar",
                f"{room.core.name} takes multiply, add, or multiply and add; give it to vector",
            )


def _scalar_tensor_tensor(it: isa.ScalarTensorTensor, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "src", it.src)
    yield from equal("src", it.src, "right", it.right)
    yield from column("operand0", it.operand0, it.src)
    yield from one_in_sbuf("src", it.src, "right", it.right)
    yield from operator("op0", it.op0, frozenset(Alu) - BITS)
    yield from operator("op1", it.op1, BINARY - BITS)


def _tensor_reduce(it: isa.TensorReduce, room: Room) -> Breaches:
    yield from operator("op", it.op, REDUCTIONS)
    yield from bits(it, it.op)
    if not 1 <= it.axes <= len(it.src.axes):
        yield Broken(Rule.SHAPE, f"{it.axes} of {len(it.src.axes)} axes are reduced", "reduce one or more")
        return
    kept = 1
    for axis in it.src.axes[: len(it.src.axes) - it.axes]:
        kept *= axis.size
    yield from sized("dst", it.dst, it.src.partitions, kept)


def _elementwise(it: isa.TensorCopy | isa.Reciprocal, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "src", it.src)


def _predicated(it: isa.CopyPredicated, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "src", it.src)
    yield from equal("src", it.src, "predicate", it.predicate)
    yield from same_type("dst", it.dst, "src", it.src)
    yield from typed("predicate", it.predicate, PREDICATES)
    yield from one_in_sbuf("src", it.src, "predicate", it.predicate)


def _scan(it: isa.TensorTensorScan, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "left", it.left)
    yield from equal("left", it.left, "right", it.right)
    yield from column("initial", it.initial, it.left)
    yield from one_in_sbuf("left", it.left, "right", it.right)
    yield from operator("op0", it.op0, BINARY - BITS)
    yield from operator("op1", it.op1, BINARY - BITS)


def _memset(it: isa.Memset, room: Room) -> Breaches:
    if not _fits(it.value, it.dst.dtype):
        yield Broken(Rule.VALUE, f"{it.dst.dtype} does not hold {it.value}", "use another value or type")


def _fits(value: float, dtype: DType) -> bool:
    if dtype is DType.BOOL:
        return value in (0, 1)
    if dtype.is_float:
        return not isfinite(value) or abs(value) <= _LARGEST[dtype]
    info = np.iinfo(dtype.stored)
    return not isnan(value) and bool(info.min <= value <= info.max) and value == int(value)


def _bn_stats(it: isa.BnStats, room: Room) -> Breaches:
    if it.src.elements > MOST_STATISTICS:
        yield Broken(Rule.SHAPE, f"src has {it.src.elements} elements", f"split it into pieces of {MOST_STATISTICS}")
    yield from sized("dst", it.dst, it.src.partitions, 6)


def _bn_aggregate(it: isa.BnAggregate, room: Room) -> Breaches:
    if it.src.elements % 3:
        yield Broken(Rule.SHAPE, f"src has {it.src.elements} elements", "give it whole triples of bn_stats")
    yield from sized("dst", it.dst, it.src.partitions, 2)


def _searched(src: Tile) -> Breaches:
    if not SEARCHED[0] <= src.elements <= SEARCHED[1]:
        yield Broken(Rule.SHAPE, f"src has {src.elements} elements", f"search {SEARCHED[0]} to {SEARCHED[1]}")


def _max8(it: isa.Max8, room: Room) -> Breaches:
    yield from _searched(it.src)
    if len(it.src.axes) > 2:
        yield Broken(Rule.AXES, f"src has {len(it.src.axes)} axes beside its partition", "use up to 2")
    yield from sized("dst", it.dst, it.src.partitions, 8)


def _find_index8(it: isa.FindIndex8, room: Room) -> Breaches:
    yield from _searched(it.src)
    yield from sized("values", it.values, it.src.partitions, 8)
    yield from sized("dst", it.dst, it.src.partitions, 8)
    yield from typed("dst", it.dst, (DType.UINT16, DType.UINT32))


def _match_replace8(it: isa.MatchReplace8, room: Room) -> Breaches:
    yield from _searched(it.src)
    yield from sized("values", it.values, it.src.partitions, 8)
    yield from equal("dst", it.dst, "src", it.src)


def _iota(it: isa.Iota, room: Room) -> Breaches:
    yield from _counted(it, room)


def _affine_select(it: isa.AffineSelect, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "src", it.src)
    yield from operator("compare", it.compare, COMPARISONS)
    yield from _counted(it, room)


def _counted(it: isa.Iota | isa.AffineSelect, room: Room) -> Breaches:
    """One step for each axis, and sums that 32 bits hold."""
    if len(it.steps) != len(it.dst.axes):
        yield Broken(
            Rule.SHAPE, f"{len(it.steps)} steps for {len(it.dst.axes)} axes", "give one step for each axis of dst"
        )
        return
    wrong = list(room.follows(it.start))
    yield from wrong
    if not wrong:
        reach = [(it.dst.partitions - 1) * it.by_partition]
        reach += [(axis.size - 1) * step for axis, step in zip(it.dst.axes, it.steps, strict=True)]
        low, high = it.start.bounds(room.counts)
        low, high = low + sum(min(each, 0) for each in reach), high + sum(max(each, 0) for each in reach)
        if low < -(2**31) or high >= 2**31:
            yield Broken(Rule.VALUE, f"numbers from {low} to {high}", "stay within 32 bits")


def _gather_free(it: isa.GatherFree, room: Room) -> Breaches:
    yield from equal("dst", it.dst, "indices", it.indices)
    yield from same_type("dst", it.dst, "src", it.src)
    yield from typed("indices", it.indices, (DType.UINT32,))
    if it.src.partitions != it.dst.partitions:
        yield unequal(f"dst has {it.dst.partitions} partitions, src {it.src.partitions}")


def _partition_reduce(it: isa.PartitionReduce, room: Room) -> Breaches:
    yield from operator("op", it.op, ACROSS_PARTITIONS)
    if it.op in BITS and (it.dst.dtype.is_float or it.src.dtype.is_float):
        yield Broken(Rule.DTYPE, f"{it.op} from {it.src.dtype} to {it.dst.dtype}", "bit operators take integers")
    yield from sized("dst", it.dst, 1, it.src.elements)


LANE_RULES: Final[Mapping[type[Instruction], Callable[[Any, Room], Breaches]]] = {
    isa.Activation: _activation,
    isa.TensorTensor: _tensor_tensor,
    isa.TensorScalar: _tensor_scalar,
    isa.ScalarTensorTensor: _scalar_tensor_tensor,
    isa.TensorReduce: _tensor_reduce,
    isa.TensorCopy: _elementwise,
    isa.CopyPredicated: _predicated,
    isa.TensorTensorScan: _scan,
    isa.Memset: _memset,
    isa.Reciprocal: _elementwise,
    isa.BnStats: _bn_stats,
    isa.BnAggregate: _bn_aggregate,
    isa.Max8: _max8,
    isa.FindIndex8: _find_index8,
    isa.MatchReplace8: _match_replace8,
    isa.Iota: _iota,
    isa.AffineSelect: _affine_select,
    isa.GatherFree: _gather_free,
    isa.PartitionReduce: _partition_reduce,
}
