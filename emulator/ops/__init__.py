"""The operators of the graph: one class each, with its shape rule and its numerics."""

from nxpipe.emulator.ops.base import OPERATORS, Attribute, Operator, attributes, result_type
from nxpipe.emulator.ops.collective import AllGather, AllReduce, RankSlice, ReduceScatter
from nxpipe.emulator.ops.elementwise import Binary, Cast, Unary, Where
from nxpipe.emulator.ops.index import Gather, Index, IndexUpdate, Iota, ScatterAlong, TakeAlong
from nxpipe.emulator.ops.linalg import Attention, GroupedMatMul, Linear, MatMul
from nxpipe.emulator.ops.reduce import ArgReduce, ArgSort, Cumulate, LayerNorm, Reduce, RmsNorm, Softmax
from nxpipe.emulator.ops.shape import Bitcast, Broadcast, Concat, Flip, Pad, Reshape, Slice, SliceUpdate, Transpose
from nxpipe.emulator.ops.spatial import Convolution, Pool, Resample

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
