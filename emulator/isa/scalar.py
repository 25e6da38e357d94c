"""The scalar engine: functions of one number. It executes `tensor_copy` and `tensor_scalar` of `vector` too."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.constraints import InstructionContext, Rule, Violation, Violations, column, equal, typed
from nxpipe.emulator.isa.cost import ISSUE
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Tile

_READ_OUT: Final = 64  # cycles for the sums of a row


class Function(StrEnum):
    """Functions of one number that the scalar engine looks up in tables."""

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


@dataclass(frozen=True, kw_only=True)
class Activation(Instruction, name="activation"):
    """`function(src * scale + bias)` in float32. `scale` and `bias` are numbers, or columns with one number for each
    partition. `total`, if given, receives the sum of each partition's results."""

    dst: Tile
    src: Tile
    function: Function
    scale: float | Tile = 1.0
    bias: float | Tile = 0.0
    total: Tile | None = None

    engines: ClassVar[Mapping[Engine, int]] = {Engine.SCALAR: 2}
    writes: ClassVar[tuple[str, ...]] = ("dst", "total")

    def violations(self, context: InstructionContext) -> Violations:
        yield from equal("dst", self.dst, "src", self.src)
        yield from column("scale", self.scale, self.src)
        yield from column("bias", self.bias, self.src)
        yield from column("total", self.total, self.src)
        if isinstance(self.scale, Tile):
            yield from typed("scale", self.scale, (DType.FLOAT32,))
        if isinstance(self.bias, Tile) and self.bias.dtype is DType.TFLOAT32:
            yield Violation(Rule.DTYPE, "bias is tfloat32", "use float32")
        if context.core.nki_gen > 2 or self.bias == 0.0:
            return
        if isinstance(self.bias, float | int):
            yield Violation(
                Rule.GENERATION, f"bias is the number {self.bias} on {context.core.name}", "pass it as a column in SBUF"
            )
        if self.function is Function.RECIPROCAL:
            yield Violation(Rule.GENERATION, f"reciprocal has a bias on {context.core.name}", "add it first")

    def cycles(self, core: CoreSpec) -> float:
        return max(ISSUE, self.src.elements) + (_READ_OUT if self.total else 0)
