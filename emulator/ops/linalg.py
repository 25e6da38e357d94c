"""Matrix products: the tensor engine's work. Operands of one float type, sums in float32, any float type out."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops.base import Operator, broadcast_shape, require


def require_matrix_operands(op: Operator, *operands: TensorType) -> None:
    dtypes = {operand.dtype for operand in operands}
    listing = ", ".join(map(str, operands))
    require(len(dtypes) == 1 and operands[0].dtype.is_float, op, f"operands {listing} are not of one float type")


@dataclass(frozen=True)
class Linear(Operator, name="linear"):
    """x times the transpose of a weight [outputs, inputs], plus a bias: checkpoints store their weights so."""

    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, x: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
        require_matrix_operands(self, x, weight)
        require(weight.rank == 2 and x.rank >= 1, self, f"{x} times {weight} is no linear layer")
        require(x.shape[-1] == weight.shape[1], self, f"{x} has rows of another length than {weight}")
        if bias is not None:
            fits = bias.shape == weight.shape[:1] and bias.dtype.is_float
            require(fits, self, f"the bias is {bias} for {weight.shape[0]} outputs")
        require(self.out.is_float, self, f"a product cannot leave as {self.out}")
        return TensorType(x.shape[:-1] + weight.shape[:1], self.out)

    def compute(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        # The weight on the left is the faster way round, and leaves the result's rows as columns in memory.
        columns = weight @ x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T
        if bias is not None:
            columns += bias[:, np.newaxis]
        return columns.T.reshape(x.shape[:-1] + weight.shape[:1])


@dataclass(frozen=True)
class MatMul(Operator, name="matmul"):
    """Products of matrices in the last two axes; the axes before them broadcast."""

    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, a: TensorType, b: TensorType) -> TensorType:
        require_matrix_operands(self, a, b)
        require(a.rank >= 2 and b.rank >= 2, self, f"{a} and {b} are not both matrices")
        require(a.shape[-1] == b.shape[-2], self, f"{a} and {b} do not agree on the inner size")
        require(self.out.is_float, self, f"a product cannot leave as {self.out}")
        batch = broadcast_shape(self, (a.shape[:-2], b.shape[:-2]))
        return TensorType((*batch, a.shape[-2], b.shape[-1]), self.out)

    def compute(self, a: Array, b: Array) -> Array:
        return np.asarray(np.matmul(a, b))


@dataclass(frozen=True)
class GroupedMatMul(Operator, name="grouped_matmul"):
    """Rows [rows, inner] sorted by group, each group times a matrix of its own [groups, inner, outputs]: experts.

    `ends` says where each group ends. Rows behind the last end belong to no group and yield zeros.
    """

    out: DType
    matrix_operands: ClassVar[int] = 2

    def infer(self, rows: TensorType, matrices: TensorType, ends: TensorType) -> TensorType:
        require_matrix_operands(self, rows, matrices)
        require(rows.rank == 2 and matrices.rank == 3, self, f"{rows} by {matrices} is no product of groups")
        require(rows.shape[1] == matrices.shape[1], self, f"{rows} and {matrices} do not agree on the inner size")
        fits = ends.shape == matrices.shape[:1] and ends.dtype.is_integer
        require(fits, self, f"the ends are {ends} for {matrices.shape[0]} groups")
        require(self.out.is_float, self, f"a product cannot leave as {self.out}")
        return TensorType((rows.shape[0], matrices.shape[2]), self.out)

    def compute(self, rows: Array, matrices: Array, ends: Array) -> Array:
        result = np.zeros((rows.shape[0], matrices.shape[2]), np.float32)
        start = 0
        for matrix, end in zip(matrices, ends, strict=True):
            if end > start:
                result[start:end] = rows[start:end] @ matrix
                start = end
        return result
