"""Elementwise operators on tiles: the instructions that compute one node's result from its operands.

Every node rounds to its own type, so that fusion does not change results.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final

from nxpipe.emulator.ir.nodes import Node
from nxpipe.emulator.ir.types import DType, TensorType, promote
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.lower import integers
from nxpipe.emulator.lower.functions import (
    COMPOSED,
    LOOKED_UP,
    divided,
    floor_divide,
    power,
    remainder,
    rounded,
    truncated,
    truncating_divide,
)
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.lanes import Lanes, Operand
from nxpipe.emulator.ops import Binary, Cast, Unary, Where
from nxpipe.emulator.ops.base import Operator

_ARITHMETIC: Final = {
    "add": Alu.ADD,
    "subtract": Alu.SUBTRACT,
    "multiply": Alu.MULTIPLY,
    "maximum": Alu.MAXIMUM,
    "minimum": Alu.MINIMUM,
}
_DIRECT: Final = {*_ARITHMETIC, *LOOKED_UP}  # a single instruction on floats
_ON_BOOLEANS: Final = {"add": Alu.MAXIMUM, "multiply": Alu.MINIMUM, "maximum": Alu.MAXIMUM, "minimum": Alu.MINIMUM}
_COMPARISONS: Final = {
    "equal": Alu.EQUAL,
    "greater": Alu.GREATER,
    "greater_equal": Alu.GREATER_EQUAL,
    "less": Alu.LESS,
    "less_equal": Alu.LESS_EQUAL,
    "not_equal": Alu.NOT_EQUAL,
}
_BITWISE: Final = {"and": Alu.BITWISE_AND, "or": Alu.BITWISE_OR, "xor": Alu.BITWISE_XOR}
_DIVISIONS: Final[Mapping[str, Callable[[Lanes, Operand, Operand, Tile], Any]]] = {
    "divide": divided,
    "floor_divide": floor_divide,
    "power": power,
    "remainder": remainder,
    "truncating_divide": truncating_divide,
}
_MULTI_STEP: Final = ("floor_divide", "power", "remainder", "truncating_divide")
_FEW, _MANY = 8, 28  # bounds on temporaries


def is_applicable(node: Node) -> bool:
    """True for an elementwise operator."""
    return type(node.op) in _APPLIED


def is_exact(node: Node) -> bool:
    """True for a cast between float types that represents every value exactly."""
    source, target = node.operands[0].type.dtype, node.result.type.dtype
    return isinstance(node.op, Cast) and source.is_float and _holds(target, source)


def _holds(wide: DType, narrow: DType) -> bool:
    return wide.is_float and promote(TensorType((), wide), TensorType((), narrow)) is wide


def temporaries(node: Node) -> int:
    """An upper bound on the float32 tiles that a node needs in addition to operands and result; tests/lower checks it
    for all operators."""
    types = [*(operand.type.dtype for operand in node.operands), node.result.type.dtype]
    if all(dtype.is_float for dtype in types) and (isinstance(node.op, Cast) or node.op.label in _DIRECT):
        return 0
    return _MANY if node.op.label in COMPOSED or node.op.label in _MULTI_STEP else _FEW


def apply(k: Kernel, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    """Emit the instructions of a node. An operand is a tile or a compile-time number."""
    with k.scope():
        _APPLIED[type(node.op)](Lanes(k, dst.partitions, dst.elements), node, dst, operands)


def _binary(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    types = [operand.type for operand in node.operands]
    dtype, function = promote(*types), node.op.label
    if not dtype.is_float and function != "divide":
        operands = [
            integers.convert_operand(lanes, type_.dtype, dtype, operand)
            for type_, operand in zip(types, operands, strict=True)
        ]
    left, right = operands
    if function in _COMPARISONS:
        op = _COMPARISONS[function]
        if dtype.is_float:
            lanes.two(op, left, right, dst)
        else:
            integers.compare(lanes, op, dtype, dst, left, right)
    elif function in _BITWISE:
        integers.combine(lanes, _BITWISE[function], dtype, dst, left, right)
    elif dtype.is_float or function == "divide":
        if function in _DIVISIONS:
            _DIVISIONS[function](lanes, left, right, dst)
        else:
            lanes.two(_ARITHMETIC[function], left, right, dst)
    elif dtype is DType.BOOL:
        lanes.two(_ON_BOOLEANS[function], left, right, dst)
    else:
        integers.arithmetic(lanes, function, dtype, dst, left, right)


def _unary(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    function, dtype, operand = node.op.label, node.operands[0].type.dtype, operands[0]
    dtype_of_number = dst.dtype if function in _TYPE_PRESERVING else _float(dtype)
    x = operand if isinstance(operand, Tile) else lanes.filled(operand, dtype_of_number)
    if function in LOOKED_UP:
        lanes.function(LOOKED_UP[function], x, dst)
    elif function in COMPOSED:
        COMPOSED[function](lanes, x, dst)
    elif function == "reciprocal":
        lanes.reciprocal(x, dst)
    elif function in _PREDICATES:
        _PREDICATES[function](lanes, x, dst)
    elif dtype.is_float:
        _ON_FLOATS[function](lanes, x, dst)
    else:
        _on_integers(lanes, function, dtype, x, dst)


def _float(dtype: DType) -> DType:
    return DType.FLOAT32 if not dtype.is_float else dtype


def _isinf(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.then(x, Alu.ABS, 0.0, Alu.EQUAL, inf, dst)


def _isfinite(lanes: Lanes, x: Tile, dst: Tile) -> None:
    lanes.then(x, Alu.ABS, 0.0, Alu.LESS, inf, dst)


_PREDICATES: Final[Mapping[str, Callable[[Lanes, Tile, Tile], Any]]] = {
    "isfinite": _isfinite,
    "isinf": _isinf,
    "isnan": lambda lanes, x, dst: lanes.two(Alu.NOT_EQUAL, x, x, dst),
    "logical_not": lambda lanes, x, dst: lanes.two(Alu.EQUAL, x, 0.0, dst),
}
_ON_FLOATS: Final[Mapping[str, Callable[[Lanes, Tile, Tile], Any]]] = {
    "abs": lambda lanes, x, dst: lanes.two(Alu.ABS, x, 0.0, dst),
    "ceil": lambda lanes, x, dst: rounded(lanes, x, dst, Alu.LESS),
    "floor": lambda lanes, x, dst: rounded(lanes, x, dst, Alu.GREATER),
    "negate": lambda lanes, x, dst: lanes.two(Alu.MULTIPLY, x, -1.0, dst),
    "relu": lambda lanes, x, dst: lanes.two(Alu.MAXIMUM, x, 0.0, dst),
    "round": rounded,
    "sign": lambda lanes, x, dst: lanes.function(Function.SIGN, x, dst),
    "trunc": truncated,
}
_TYPE_PRESERVING: Final = {*_ON_FLOATS, "invert"}  # the result has the operand's type


def _on_integers(lanes: Lanes, function: str, dtype: DType, x: Tile, dst: Tile) -> None:
    if function in ("ceil", "floor", "round", "trunc"):
        lanes.copy(x, dst)
    elif function == "sign":
        lanes.function(Function.SIGN, x, dst)
    elif function == "relu":
        integers.arithmetic(lanes, "maximum", dtype, dst, x, 0)
    elif function == "invert":
        every_bit = 1 if dtype is DType.BOOL else 2 ** (8 * dst.dtype.itemsize) - 1
        integers.combine(lanes, Alu.BITWISE_XOR, dtype, dst, x, every_bit)
    elif function == "negate":
        integers.arithmetic(lanes, "subtract", dtype, dst, 0, x)
    else:
        words = integers.WordArithmetic.of(lanes, dtype)
        word = words.load(x)
        negative = words.two(Alu.SUBTRACT, words.load(0), word)
        words.store(words.two(Alu.MAXIMUM, word, negative) if words.dtype is DType.INT32 else word, dst, dtype)


def _where(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    condition, chosen, other = operands
    _, chosen_type, other_type = (operand.type.dtype for operand in node.operands)
    target = node.result.type.dtype
    if not isinstance(condition, Tile):
        _converted(lanes, chosen_type if condition else other_type, target, dst, chosen if condition else other)
        return
    _converted(lanes, other_type, target, dst, other)
    if isinstance(chosen, Tile) and chosen.dtype is not dst.dtype:
        converted = lanes.tile(dst.dtype)
        _converted(lanes, chosen_type, target, converted, chosen)
        chosen = converted
    lanes.choose(dst, condition, chosen)


def _converted(lanes: Lanes, source: DType, target: DType, dst: Tile, operand: Operand) -> None:
    """Convert with wrap-around; a plain copy between integer types saturates."""
    if isinstance(operand, Tile) and source.is_integer and target.is_integer:
        integers.convert(lanes, source, target, dst, operand)
    else:
        lanes.copy(operand, dst)


def _cast(lanes: Lanes, node: Node, dst: Tile, operands: Sequence[Operand]) -> None:
    source, target = node.operands[0].type.dtype, node.result.type.dtype
    operand = operands[0]
    x = operand if isinstance(operand, Tile) else lanes.filled(operand, _float(source))
    if target is DType.BOOL:
        lanes.two(Alu.NOT_EQUAL, x, 0.0, dst)
    elif target.is_float or source is DType.BOOL:
        lanes.copy(x, dst)
    elif source.is_float:
        lanes.copy(truncated(lanes, x, lanes.tile()), dst)
    else:
        integers.convert(lanes, source, target, dst, operand)


_APPLIED: Final[Mapping[type[Operator], Callable[[Lanes, Node, Tile, Sequence[Operand]], None]]] = {
    Binary: _binary,
    Cast: _cast,
    Unary: _unary,
    Where: _where,
}
