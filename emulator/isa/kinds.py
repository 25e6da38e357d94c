"""Which engine carries out which instruction, and the operators and types that each takes: tables only."""

from collections.abc import Mapping
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa import instructions as isa
from nxpipe.emulator.isa.instructions import DMA_QUEUES, Alu, Engine, Instruction

BITS: Final = frozenset({Alu.BITWISE_AND, Alu.BITWISE_OR, Alu.BITWISE_XOR, Alu.INVERT, Alu.LEFT_SHIFT, Alu.RIGHT_SHIFT})
UNARY: Final = frozenset({Alu.ABS, Alu.SQUARE, Alu.RELU, Alu.RSQRT, Alu.RECIPROCAL, Alu.INVERT})
BINARY: Final = frozenset(Alu) - UNARY
COMPARISONS: Final = frozenset({Alu.EQUAL, Alu.NOT_EQUAL, Alu.GREATER_EQUAL, Alu.GREATER, Alu.LESS_EQUAL, Alu.LESS})
REDUCTIONS: Final = frozenset(
    {Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY, Alu.MAXIMUM, Alu.MINIMUM, Alu.LOGICAL_AND, Alu.LOGICAL_OR}
    | {Alu.LOGICAL_XOR, Alu.BITWISE_AND, Alu.BITWISE_OR, Alu.BITWISE_XOR}
)
ACROSS_PARTITIONS: Final = frozenset({Alu.ADD, Alu.MAXIMUM, Alu.BITWISE_OR, Alu.BITWISE_AND})
ACROSS_RANKS: Final = frozenset({Alu.ADD, Alu.MINIMUM, Alu.MAXIMUM})

MULTIPLIED: Final = (
    DType.FLOAT8_E4M3,
    DType.FLOAT8_E4M3FN,
    DType.FLOAT8_E5M2,
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.TFLOAT32,
    DType.FLOAT32,
)
PREDICATES: Final = (DType.UINT8, DType.UINT16, DType.UINT32, DType.BOOL)
FULL: Final = (DType.FLOAT32, DType.TFLOAT32)

# Who carries it out, and from which generation on.
_DMA: Final = dict.fromkeys(DMA_QUEUES, 2)
_VECTOR: Final = {Engine.VECTOR: 2}
_GPSIMD: Final = {Engine.GPSIMD: 2}
_COLLECTIVE: Final = {Engine.COLLECTIVE: 2}
ENGINES: Final[Mapping[type[Instruction], Mapping[Engine, int]]] = {
    isa.DmaCopy: _DMA,
    isa.DmaTranspose: dict.fromkeys(DMA_QUEUES, 3),
    isa.Matmul: {Engine.TENSOR: 2},
    isa.Transpose: {Engine.TENSOR: 2, Engine.VECTOR: 2},
    isa.Activation: {Engine.SCALAR: 2},
    isa.TensorTensor: _VECTOR | _GPSIMD,
    isa.TensorScalar: _VECTOR | {Engine.SCALAR: 3} | _GPSIMD,
    isa.ScalarTensorTensor: _VECTOR,
    isa.TensorReduce: _VECTOR,
    isa.TensorCopy: _VECTOR | {Engine.SCALAR: 3} | _GPSIMD,
    isa.CopyPredicated: _VECTOR,
    isa.TensorTensorScan: _VECTOR,
    isa.Memset: _VECTOR | _GPSIMD,
    isa.Reciprocal: _VECTOR,
    isa.BnStats: _VECTOR,
    isa.BnAggregate: _VECTOR,
    isa.Max8: _VECTOR,
    isa.FindIndex8: _VECTOR,
    isa.MatchReplace8: _VECTOR,
    isa.Iota: _GPSIMD,
    isa.AffineSelect: _GPSIMD,
    isa.GatherFree: _GPSIMD,
    isa.PartitionReduce: _GPSIMD,
    isa.AllReduce: _COLLECTIVE,
    isa.ReduceScatter: _COLLECTIVE,
    isa.AllGather: _COLLECTIVE,
}

MOST_STATISTICS: Final = 512
SEARCHED: Final = (8, 16384)
TRANSPOSED: Final = {Engine.TENSOR: 128, Engine.VECTOR: 32}
