"""The operators of the graph: few, ours, one class each with its shape rule and its numerics."""

from emulator.ops.attention import Attention
from emulator.ops.base import OPERATORS, Attribute, Operator, attributes, result_type
from emulator.ops.collective import AllGather, AllReduce, RankSlice, ReduceScatter
from emulator.ops.convolve import Convolution
from emulator.ops.elementwise import Binary, Cast, Unary, Where
from emulator.ops.index import Gather, Index, IndexUpdate, Iota, ScatterAlong, TakeAlong
from emulator.ops.linalg import GroupedMatMul, Linear, MatMul
from emulator.ops.normalise import LayerNorm, RmsNorm, Softmax
from emulator.ops.pool import Pool, Resample
from emulator.ops.reduce import ArgReduce, ArgSort, Cumulate, Reduce
from emulator.ops.shape import Bitcast, Broadcast, Concat, Flip, Pad, Reshape, Slice, SliceUpdate, Transpose

__all__ = [
    "OPERATORS",
    "AllGather",
    "AllReduce",
    "ArgReduce",
    "ArgSort",
    "Attention",
    "Attribute",
    "Binary",
    "Bitcast",
    "Broadcast",
    "Cast",
    "Concat",
    "Convolution",
    "Cumulate",
    "Flip",
    "Gather",
    "GroupedMatMul",
    "Index",
    "IndexUpdate",
    "Iota",
    "LayerNorm",
    "Linear",
    "MatMul",
    "Operator",
    "Pad",
    "Pool",
    "RankSlice",
    "Reduce",
    "ReduceScatter",
    "Resample",
    "Reshape",
    "RmsNorm",
    "ScatterAlong",
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
