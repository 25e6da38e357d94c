"""One elementwise node on tiles: the instructions that bring its result from its operands' tiles into another.

Every node rounds to its own type on the way out, as the whole program does when it is run node by node.
"""

from collections.abc import Sequence
from typing import Final

from emulator.graph import Node
from emulator.isa.instructions import Activation, Alu, Engine, Function, TensorCopy, TensorTensor
from emulator.isa.operands import Tile
from emulator.lower.kernel import Kernel
from emulator.ops import Binary, Cast, Unary

_BINARY: Final = {
    "add": Alu.ADD,
    "subtract": Alu.SUBTRACT,
    "multiply": Alu.MULTIPLY,
    "maximum": Alu.MAXIMUM,
    "minimum": Alu.MINIMUM,
}
_UNARY: Final = {
    "gelu": Function.GELU,
    "gelu_tanh": Function.GELU_TANH,
    "relu": Function.RELU,
    "silu": Function.SILU,
    "tanh": Function.TANH,
    "sigmoid": Function.SIGMOID,
    "exp": Function.EXP,
}


def is_applicable(node: Node) -> bool:
    """Whether its instructions are known, for the types that it has."""
    op = node.op
    types = [operand.type.dtype for operand in node.operands]
    if isinstance(op, Binary):
        return op.function in _BINARY and all(dtype.is_float for dtype in types)
    if isinstance(op, Unary):
        return op.function in _UNARY and all(dtype.is_float for dtype in types)
    return isinstance(op, Cast) and types[0].is_float and op.dtype.is_float


def apply(k: Kernel, node: Node, dst: Tile, operands: Sequence[Tile]) -> None:
    op = node.op
    if isinstance(op, Binary):
        left, right = operands
        k.emit(TensorTensor(engine=Engine.VECTOR, dst=dst, left=left, right=right, op=_BINARY[op.function]))
    elif isinstance(op, Unary):
        k.emit(Activation(engine=Engine.SCALAR, dst=dst, src=operands[0], function=_UNARY[op.function]))
    else:
        k.emit(TensorCopy(engine=Engine.VECTOR, dst=dst, src=operands[0]))
