"""What each instruction does, by its kind. Collectives are not among them: they need all ranks."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from nxpipe.emulator.core import dma, folds, gpsimd, scalar, search, tensor, vector
from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.isa import instructions as isa
from nxpipe.emulator.isa.instructions import Instruction

MEANINGS: Final[Mapping[type[Instruction], Callable[[Any, Bound], None]]] = {
    isa.DmaCopy: dma.dma_copy,
    isa.DmaTranspose: dma.dma_transpose,
    isa.Matmul: tensor.matmul,
    isa.Transpose: tensor.transpose,
    isa.Activation: scalar.activation,
    isa.TensorTensor: vector.tensor_tensor,
    isa.TensorScalar: vector.tensor_scalar,
    isa.ScalarTensorTensor: vector.scalar_tensor_tensor,
    isa.TensorCopy: vector.tensor_copy,
    isa.CopyPredicated: vector.copy_predicated,
    isa.Memset: vector.memset,
    isa.Reciprocal: vector.reciprocal,
    isa.TensorReduce: folds.tensor_reduce,
    isa.PartitionReduce: folds.partition_reduce,
    isa.TensorTensorScan: folds.scan,
    isa.BnStats: folds.bn_stats,
    isa.BnAggregate: folds.bn_aggregate,
    isa.Max8: search.max8,
    isa.FindIndex8: search.find_index8,
    isa.MatchReplace8: search.match_replace8,
    isa.Iota: gpsimd.iota,
    isa.AffineSelect: gpsimd.affine_select,
    isa.GatherFree: gpsimd.gather_free,
}
