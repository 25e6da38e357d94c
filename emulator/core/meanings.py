"""What each instruction does, by its kind. Collectives are not among them: they need all ranks."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from nxpipe.emulator.core import dma, folds, gpsimd, scalar, search, tensor, vector
from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.isa.dma import DmaCopy, DmaTranspose
from nxpipe.emulator.isa.gpsimd import AffineSelect, GatherFree, Iota, PartitionReduce
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.scalar import Activation
from nxpipe.emulator.isa.tensor import Matmul, Transpose
from nxpipe.emulator.isa.vector import (
    BnAggregate,
    BnStats,
    CopyPredicated,
    FindIndex8,
    MatchReplace8,
    Max8,
    Memset,
    Reciprocal,
    ScalarTensorTensor,
    TensorCopy,
    TensorReduce,
    TensorScalar,
    TensorTensor,
    TensorTensorScan,
)

MEANINGS: Final[Mapping[type[Instruction], Callable[[Any, Bound], None]]] = {
    DmaCopy: dma.dma_copy,
    DmaTranspose: dma.dma_transpose,
    Matmul: tensor.matmul,
    Transpose: tensor.transpose,
    Activation: scalar.activation,
    TensorTensor: vector.tensor_tensor,
    TensorScalar: vector.tensor_scalar,
    ScalarTensorTensor: vector.scalar_tensor_tensor,
    TensorCopy: vector.tensor_copy,
    CopyPredicated: vector.copy_predicated,
    Memset: vector.memset,
    Reciprocal: vector.reciprocal,
    TensorReduce: folds.tensor_reduce,
    PartitionReduce: folds.partition_reduce,
    TensorTensorScan: folds.scan,
    BnStats: folds.bn_stats,
    BnAggregate: folds.bn_aggregate,
    Max8: search.max8,
    FindIndex8: search.find_index8,
    MatchReplace8: search.match_replace8,
    Iota: gpsimd.iota,
    AffineSelect: gpsimd.affine_select,
    GatherFree: gpsimd.gather_free,
}
