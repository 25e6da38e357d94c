"""What an instruction costs by the documented rules.

The formulas are those of docs/isa.md, which says where each comes from. There is no model in here, nor any factor that
makes one come out right: what the documents leave open is calibrated elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa import instructions as isa
from nxpipe.emulator.isa.instructions import Alu, Engine, Instruction
from nxpipe.emulator.isa.operands import Memory
from nxpipe.emulator.isa.transfer import START_NS, is_dense, transfer_ns

ISSUE: Final = 64  # cycles between two instructions of the vector or scalar engine, at least
GPSIMD_START: Final = 150
READ_OUT: Final = 64  # of the scalar engine's sums
GATHERED_AT_ONCE: Final = 512
_HALVES: Final = (DType.BFLOAT16, DType.FLOAT16)
_BYTES: Final = (DType.FLOAT8_E4M3, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
_PLAIN: Final = (Alu.ADD, Alu.SUBTRACT, Alu.MULTIPLY)


@dataclass(frozen=True, slots=True)
class Cost:
    """How long its engine has no time for another; DMA has no cycles, and a `start` that overlaps with other queues'
    work."""

    ns: float
    cycles: float | None = None
    start_ns: float = 0.0


def cost(instruction: Instruction, core: CoreSpec) -> Cost:
    rate = _clock(instruction.engine, core)
    if rate is None:
        return Cost(transfer_ns(instruction, core), None, START_NS)
    cycles = _RULES[type(instruction)](instruction, core)
    return Cost(cycles / rate, cycles)


def _clock(engine: Engine, core: CoreSpec) -> float | None:
    clocks = {
        Engine.TENSOR: core.tensor_ghz,
        Engine.VECTOR: core.vector_ghz,
        Engine.SCALAR: core.scalar_ghz,
        Engine.GPSIMD: core.gpsimd_ghz,
    }
    return clocks.get(engine)


def _matmul(it: isa.Matmul, core: CoreSpec) -> float:
    slow = core.fp32_cycle_factor if DType.FLOAT32 in (it.stationary.dtype, it.moving.dtype) else 1
    return slow * max(min(ISSUE, it.stationary.elements), it.moving.elements)


def _transpose(it: isa.Transpose, core: CoreSpec) -> float:
    if it.engine is Engine.VECTOR:
        return max(ISSUE, it.src.elements)
    slow = core.fp32_cycle_factor if it.src.dtype is DType.FLOAT32 else 1
    return slow * max(it.src.partitions, min(ISSUE, it.src.elements))


def _activation(it: isa.Activation, core: CoreSpec) -> float:
    return max(ISSUE, it.src.elements) + (READ_OUT if it.total else 0)


def _tensor_tensor(it: isa.TensorTensor, core: CoreSpec) -> float:
    n, all_three = it.left.elements, (it.dst, it.left, it.right)
    if it.engine is Engine.GPSIMD:
        return GPSIMD_START + 2 * n
    near = it.left.memory is it.right.memory is Memory.SBUF
    plain = it.op in _PLAIN and all(tile.dtype is DType.BFLOAT16 and is_dense(tile.axes) for tile in all_three)
    fast = core.nki_gen > 2 and all(tile.dtype in _short(core) for tile in all_three)
    return max(ISSUE, n if not near or plain or fast else 2 * n)


def _one_input_fast(it: isa.TensorCopy | isa.TensorScalar, core: CoreSpec) -> float:
    """Between short floats some engines move several elements at once."""
    n = it.src.elements
    if it.engine is Engine.GPSIMD:
        return GPSIMD_START + (4 * n if isinstance(it, isa.TensorScalar) else n)
    at_once = 1
    if it.engine is Engine.SCALAR:
        at_once = 2 if core.nki_gen > 3 and all(tile.dtype in _HALVES for tile in (it.dst, it.src)) else 1
    elif core.nki_gen > 2 and all(tile.dtype in _short(core) for tile in (it.dst, it.src)):
        at_once = 4 if all(is_dense(tile.axes) and tile.memory is Memory.SBUF for tile in (it.dst, it.src)) else 2
    return max(ISSUE, n / at_once)


def _short(core: CoreSpec) -> tuple[DType, ...]:
    return (*_HALVES, *_BYTES) if core.nki_gen > 3 else _HALVES


def _scalar_tensor_tensor(it: isa.ScalarTensorTensor, core: CoreSpec) -> float:
    n = it.src.elements
    short = it.src.dtype is it.right.dtype is DType.BFLOAT16
    fast = short and it.op0 is Alu.SUBTRACT and it.op1 is Alu.MULTIPLY and n % 2 == 0
    return max(ISSUE, n if fast else 2 * n)


def _tensor_reduce(it: isa.TensorReduce, core: CoreSpec) -> float:
    fast = it.src.dtype is it.dst.dtype is DType.BFLOAT16 and it.op in (Alu.ADD, Alu.MAXIMUM)
    return max(ISSUE, it.src.elements / 2 if fast else it.src.elements)


def _predicated(it: isa.CopyPredicated, core: CoreSpec) -> float:
    near = it.src.memory is it.predicate.memory is Memory.SBUF
    return max(ISSUE, 2 * it.src.elements if near else it.src.elements)


def _scan(it: isa.TensorTensorScan, core: CoreSpec) -> float:
    return max(ISSUE, 2 * it.left.elements)


def _memset(it: isa.Memset, core: CoreSpec) -> float:
    n = it.dst.elements
    if it.engine is Engine.GPSIMD:
        return GPSIMD_START + n
    return max(ISSUE, n / 2 if it.value == 0 and it.dst.dtype in _HALVES else n)


def _reciprocal(it: isa.Reciprocal, core: CoreSpec) -> float:
    return max(ISSUE, 8 * it.src.elements)


def _bn_aggregate(it: isa.BnAggregate, core: CoreSpec) -> float:
    return max(ISSUE, 13 * it.src.elements / 3)


def _gpsimd_one_pass(it: isa.Iota | isa.AffineSelect, core: CoreSpec) -> float:
    return GPSIMD_START + it.dst.elements


def _gather_free(it: isa.GatherFree, core: CoreSpec) -> float:
    return GPSIMD_START * ceil(it.dst.elements / GATHERED_AT_ONCE) + it.dst.elements


def _partition_reduce(it: isa.PartitionReduce, core: CoreSpec) -> float:
    return GPSIMD_START + it.src.partitions * it.src.elements


def _one_input(it: isa.BnStats | isa.Max8 | isa.FindIndex8 | isa.MatchReplace8, core: CoreSpec) -> float:
    return max(ISSUE, it.src.elements)


_RULES: Final[Mapping[type[Instruction], Callable[[Any, CoreSpec], float]]] = {
    isa.Matmul: _matmul,
    isa.Transpose: _transpose,
    isa.Activation: _activation,
    isa.TensorTensor: _tensor_tensor,
    isa.TensorScalar: _one_input_fast,
    isa.TensorCopy: _one_input_fast,
    isa.ScalarTensorTensor: _scalar_tensor_tensor,
    isa.TensorReduce: _tensor_reduce,
    isa.CopyPredicated: _predicated,
    isa.TensorTensorScan: _scan,
    isa.Memset: _memset,
    isa.Reciprocal: _reciprocal,
    isa.BnStats: _one_input,
    isa.BnAggregate: _bn_aggregate,
    isa.Max8: _one_input,
    isa.FindIndex8: _one_input,
    isa.MatchReplace8: _one_input,
    isa.Iota: _gpsimd_one_pass,
    isa.AffineSelect: _gpsimd_one_pass,
    isa.GatherFree: _gather_free,
    isa.PartitionReduce: _partition_reduce,
}
