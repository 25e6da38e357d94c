"""The graph as StableHLO, for AWS's compiler and for XLA: the second code generator. `EMISSIONS` has a function for
each operator."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from nxpipe.emulator import ops
from nxpipe.emulator.hlo import arithmetic, collective, contraction, indexing, movement, reductions
from nxpipe.emulator.hlo.writer import Tensor, Writer
from nxpipe.emulator.ir.nodes import Node

Emission = Callable[[Writer, Node, Sequence[Tensor]], Tensor]

EMISSIONS: Final[Mapping[type[ops.Operator], Emission]] = MappingProxyType(
    {
        ops.AllGather: collective.all_gather,
        ops.AllReduce: collective.all_reduce,
        ops.ArgReduce: reductions.arg_reduce,
        ops.ArgSort: reductions.arg_sort,
        ops.Attention: contraction.attention,
        ops.Binary: arithmetic.binary,
        ops.Bitcast: movement.bitcast,
        ops.Broadcast: movement.broadcast,
        ops.Cast: arithmetic.cast,
        ops.Concat: movement.concat,
        ops.Convolution: contraction.convolution,
        ops.Cumulate: reductions.cumulate,
        ops.Flip: movement.flip,
        ops.Gather: indexing.gather,
        ops.GroupedMatMul: contraction.grouped_matmul,
        ops.Index: indexing.index,
        ops.IndexUpdate: indexing.index_update,
        ops.Iota: movement.iota,
        ops.LayerNorm: reductions.layer_norm,
        ops.Linear: contraction.linear,
        ops.MatMul: contraction.matmul,
        ops.Pad: movement.pad,
        ops.Pool: reductions.pool,
        ops.RankSlice: collective.rank_slice,
        ops.Reduce: reductions.reduce,
        ops.ReduceScatter: collective.reduce_scatter,
        ops.Resample: indexing.resample,
        ops.Reshape: movement.reshape,
        ops.RmsNorm: reductions.rms_norm,
        ops.ScatterAlong: indexing.scatter_along,
        ops.Slice: movement.slice_,
        ops.SliceUpdate: movement.slice_update,
        ops.Softmax: reductions.softmax,
        ops.TakeAlong: indexing.take_along,
        ops.Transpose: movement.transpose,
        ops.Unary: arithmetic.unary,
        ops.Where: arithmetic.where,
    }
)
