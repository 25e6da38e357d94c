"""The instructions, after the public kernel interface of NeuronCores. docs/isa.md says what each means and costs.

One record, several readings: here is what an instruction is, `emulator.isa.limits` says which are legal on which core,
`emulator.isa.cycles` what they cost, and `emulator.core` what they do. `dst` is written, other places are read; an
instruction that also reads its `dst` says so.
"""

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import ClassVar, Self

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.operands import Far, Place, Tile

INSTRUCTIONS: dict[str, type["Instruction"]] = {}


class Engine(StrEnum):
    """Who carries instructions out. Each does so one after the other, and beside all others."""

    TENSOR = "tensor"
    VECTOR = "vector"
    SCALAR = "scalar"
    GPSIMD = "gpsimd"
    COLLECTIVE = "collective"
    DMA0 = "dma0"
    DMA1 = "dma1"
    DMA2 = "dma2"
    DMA3 = "dma3"
    DMA4 = "dma4"
    DMA5 = "dma5"
    DMA6 = "dma6"
    DMA7 = "dma7"


DMA_QUEUES = tuple(engine for engine in Engine if engine.startswith("dma"))


class Alu(StrEnum):
    ADD = "add"
    SUBTRACT = "subtract"
    MULTIPLY = "multiply"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    EQUAL = "equal"
    NOT_EQUAL = "not_equal"
    GREATER_EQUAL = "greater_equal"
    GREATER = "greater"
    LESS_EQUAL = "less_equal"
    LESS = "less"
    LOGICAL_AND = "logical_and"
    LOGICAL_OR = "logical_or"
    LOGICAL_XOR = "logical_xor"
    POWER = "power"
    ABS = "abs"
    SQUARE = "square"
    RELU = "relu"
    RSQRT = "rsqrt"
    RECIPROCAL = "reciprocal"
    BITWISE_AND = "bitwise_and"
    BITWISE_OR = "bitwise_or"
    BITWISE_XOR = "bitwise_xor"
    INVERT = "invert"
    LEFT_SHIFT = "left_shift"
    RIGHT_SHIFT = "right_shift"


class Function(StrEnum):
    """What the scalar engine looks up."""

    COPY = "copy"
    SQUARE = "square"
    SIGMOID = "sigmoid"
    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_apprx_tanh"
    GELU_SIGMOID = "gelu_apprx_sigmoid"
    SILU = "silu"
    TANH = "tanh"
    SOFTPLUS = "softplus"
    MISH = "mish"
    ERF = "erf"
    EXP = "exp"
    SIGN = "sign"
    ABS = "abs"
    LOG = "log"
    SIN = "sin"
    ARCTAN = "arctan"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    RECIPROCAL = "reciprocal"


@dataclass(frozen=True, slots=True)
class Wait:
    """Not before `engine` has carried out so many of its instructions. Less than one asks for nothing."""

    engine: Engine
    done: Affine


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """`note` is the number of the place in the user's model that it comes from; it means nothing to an engine."""

    engine: Engine
    waits: tuple[Wait, ...] = ()
    note: int = 0

    name: ClassVar[str] = ""
    # The fields whose places are written, and those that are read although they are written.
    writes: ClassVar[tuple[str, ...]] = ("dst",)
    updates: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.name = name
        INSTRUCTIONS[name] = cls

    def after(self, *waits: Wait) -> Self:
        return replace(self, waits=waits)

    @property
    def places(self) -> dict[str, Place]:
        """Every place that it names, by field."""
        found: dict[str, Place] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tile | Far):
                found[each.name] = value
        return found

    def written(self) -> tuple[Place, ...]:
        return tuple(place for name, place in self.places.items() if name in self.writes)

    def read(self) -> tuple[Place, ...]:
        """Row numbers of indirect places are read too."""
        own = [place for name, place in self.places.items() if name not in self.writes or name in self.reads_of_dst()]
        rows = [place.rows for place in self.places.values() if isinstance(place, Far) and place.rows]
        return (*own, *rows)

    def reads_of_dst(self) -> tuple[str, ...]:
        return self.updates


# Between HBM and SBUF


@dataclass(frozen=True, kw_only=True)
class DmaCopy(Instruction, name="dma_copy"):
    """Element by element in the order of the axes, a tile's partition being the first; converted through float32."""

    dst: Place
    src: Place


@dataclass(frozen=True, kw_only=True)
class DmaTranspose(Instruction, name="dma_transpose"):
    """A matrix of 2-byte or 4-byte elements in HBM into SBUF with its two axes changed; v3 and later."""

    dst: Tile
    src: Far


# The tensor engine


@dataclass(frozen=True, kw_only=True)
class Matmul(Instruction, name="nc_matmul"):
    """`dst` [M, N] in PSUM is, or with `accumulate` above 0 becomes larger by, `stationary` [K, M] transposed times
    `moving` [K, N]. What is added to must have been begun by a matmul that did not accumulate."""

    dst: Tile
    stationary: Tile
    moving: Tile
    accumulate: Affine = field(default=Affine())

    def reads_of_dst(self) -> tuple[str, ...]:
        return () if self.accumulate == Affine() else ("dst",)


@dataclass(frozen=True, kw_only=True)
class Transpose(Instruction, name="nc_transpose"):
    """`dst` [F, P] is `src` [P, F] with its axes changed: on the tensor engine up to 128 x 128 from SBUF into PSUM in
    the same type, on the vector engine up to 32 x 32 between any."""

    dst: Tile
    src: Tile


# The scalar engine


@dataclass(frozen=True, kw_only=True)
class Activation(Instruction, name="activation"):
    """`function(src * scale + bias)` in float32. `scale` and `bias` are numbers, or a column with one for each
    partition. With `total`, the sum of each partition's results is written there too."""

    dst: Tile
    src: Tile
    function: Function
    scale: float | Tile = 1.0
    bias: float | Tile = 0.0
    total: Tile | None = None

    writes: ClassVar[tuple[str, ...]] = ("dst", "total")


# The vector engine, and some of the scalar engine and GpSimd


@dataclass(frozen=True, kw_only=True)
class TensorTensor(Instruction, name="tensor_tensor"):
    """`left op right`, element by element: in float32, integers of 32 bits on GpSimd exactly, bits as they are."""

    dst: Tile
    left: Tile
    right: Tile
    op: Alu


@dataclass(frozen=True, kw_only=True)
class TensorScalar(Instruction, name="tensor_scalar"):
    """`(src op0 operand0) op1 operand1`, an operand being a number or a column; reversed, the operand comes first."""

    dst: Tile
    src: Tile
    op0: Alu
    operand0: float | Tile
    reverse0: bool = False
    op1: Alu | None = None
    operand1: float | Tile = 0.0
    reverse1: bool = False


@dataclass(frozen=True, kw_only=True)
class ScalarTensorTensor(Instruction, name="scalar_tensor_tensor"):
    """`(src op0 operand0) op1 right`: a scalar and a tensor in one pass."""

    dst: Tile
    src: Tile
    op0: Alu
    operand0: float | Tile
    op1: Alu
    right: Tile
    reverse0: bool = False
    reverse1: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorReduce(Instruction, name="tensor_reduce"):
    """Over the last `axes` axes of `src`, in float32 or bits."""

    dst: Tile
    src: Tile
    op: Alu
    axes: int = 1
    negate: bool = False


@dataclass(frozen=True, kw_only=True)
class TensorCopy(Instruction, name="tensor_copy"):
    """A copy, converted where the types differ."""

    dst: Tile
    src: Tile


@dataclass(frozen=True, kw_only=True)
class CopyPredicated(Instruction, name="tensor_copy_predicated"):
    """`dst` becomes `src` where the predicate is not 0, or with `reverse` where it is; elsewhere it stays."""

    dst: Tile
    src: Tile
    predicate: Tile
    reverse: bool = False

    updates: ClassVar[tuple[str, ...]] = ("dst",)


@dataclass(frozen=True, kw_only=True)
class TensorTensorScan(Instruction, name="tensor_tensor_scan"):
    """`r[i] = (left[i] op0 r[i-1]) op1 right[i]` along the free axis, from `initial` on, in float32."""

    dst: Tile
    left: Tile
    right: Tile
    initial: float | Tile
    op0: Alu
    op1: Alu


@dataclass(frozen=True, kw_only=True)
class Memset(Instruction, name="memset"):
    dst: Tile
    value: float


@dataclass(frozen=True, kw_only=True)
class Reciprocal(Instruction, name="reciprocal"):
    """1/x in full float32 precision."""

    dst: Tile
    src: Tile


@dataclass(frozen=True, kw_only=True)
class BnStats(Instruction, name="bn_stats"):
    """Count, mean and variance times count of the elements at even places, and the same three of those at odd ones."""

    dst: Tile
    src: Tile


@dataclass(frozen=True, kw_only=True)
class BnAggregate(Instruction, name="bn_aggr"):
    """Mean and variance of all that several `bn_stats` saw."""

    dst: Tile
    src: Tile


@dataclass(frozen=True, kw_only=True)
class Max8(Instruction, name="max8"):
    """The eight largest of each partition, descending."""

    dst: Tile
    src: Tile


@dataclass(frozen=True, kw_only=True)
class FindIndex8(Instruction, name="nc_find_index8"):
    """Where each of eight values comes first; equal ones take the next places, absent ones all bits set."""

    dst: Tile
    src: Tile
    values: Tile


@dataclass(frozen=True, kw_only=True)
class MatchReplace8(Instruction, name="nc_match_replace8"):
    """`src` with the first match of each of eight values replaced by a number."""

    dst: Tile
    src: Tile
    values: Tile
    number: float


# GpSimd


@dataclass(frozen=True, kw_only=True)
class Iota(Instruction, name="iota"):
    """`start + p * by_partition + sum of index * step` over the axes of `dst`."""

    dst: Tile
    start: Affine
    by_partition: int
    steps: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AffineSelect(Instruction, name="affine_select"):
    """`src` where `start + p * by_partition + sum of index * step` compares to 0 so, and a number elsewhere."""

    dst: Tile
    src: Tile
    start: Affine
    by_partition: int
    steps: tuple[int, ...]
    compare: Alu
    otherwise: float


@dataclass(frozen=True, kw_only=True)
class GatherFree(Instruction, name="nc_n_gather"):
    """`dst[p, i] = src[p, indices[p, i]]`: a gather inside each partition."""

    dst: Tile
    src: Tile
    indices: Tile


@dataclass(frozen=True, kw_only=True)
class PartitionReduce(Instruction, name="tensor_partition_reduce"):
    """Over the partitions, into one."""

    dst: Tile
    src: Tile
    op: Alu


# Between cores


@dataclass(frozen=True, kw_only=True)
class AllReduce(Instruction, name="all_reduce"):
    """What all ranks hold in `src`, for each of them put together by `op` in the order of ranks, in float32."""

    dst: Place
    src: Place
    op: Alu = Alu.ADD


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(Instruction, name="reduce_scatter"):
    """As AllReduce, but of the result, in as many parts as there are ranks, each rank has its own part alone."""

    dst: Place
    src: Place
    op: Alu = Alu.ADD


@dataclass(frozen=True, kw_only=True)
class AllGather(Instruction, name="all_gather"):
    """What all ranks hold in `src`, one behind the other, for each of them."""

    dst: Place
    src: Place
