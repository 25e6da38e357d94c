"""The operators of the graph: few, ours, one class each with its shape rule and its numerics."""

from emulator.ops.attention import Attention
from emulator.ops.base import OPERATORS, Attribute, Operator, attributes, result_type
from emulator.ops.elementwise import Binary, Cast, Unary, Where
from emulator.ops.index import Gather, Index, IndexUpdate, Iota, TakeAlong
from emulator.ops.linalg import Linear, MatMul
from emulator.ops.normalise import LayerNorm, RmsNorm, Softmax
from emulator.ops.reduce import ArgReduce, ArgSort, Cumulate, Reduce
from emulator.ops.shape import Broadcast, Concat, Flip, Pad, Reshape, Slice, SliceUpdate, Transpose

__all__ = [
    "OPERATORS",
    "ArgReduce",
    "ArgSort",
    "Attention",
    "Attribute",
    "Binary",
    "Broadcast",
    "Cast",
    "Concat",
    "Cumulate",
    "Flip",
    "Gather",
    "Index",
    "IndexUpdate",
    "Iota",
    "LayerNorm",
    "Linear",
    "MatMul",
    "Operator",
    "Pad",
    "Reduce",
    "Reshape",
    "RmsNorm",
    "Slice",
    "SliceUpdate",
    "Softmax",
    "TakeAlong",
    "Transpose",
    "Unary",
    "Where",
    "attributes",
    "result_type",
]
