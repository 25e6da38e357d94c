"""Options of the passes."""

from dataclasses import dataclass

from nxpipe.emulator.errors import OptionsInvalid
from nxpipe.emulator.ir.types import DType

AUTOCAST_MODES = ("none", "matmult", "all")
AUTOCAST_TYPES = {
    "bf16": DType.BFLOAT16,
    "fp16": DType.FLOAT16,
    "tf32": DType.TFLOAT32,
    "fp8_e4m3": DType.FLOAT8_E4M3,
}
# The E4M3 of each of the compiler's targets: the standard's ends at 448, that of the older ones at 240.
_E4M3 = {
    "inf2": DType.FLOAT8_E4M3,
    "trn1": DType.FLOAT8_E4M3,
    "trn1n": DType.FLOAT8_E4M3,
    "trn2": DType.FLOAT8_E4M3,
    "trn3": DType.FLOAT8_E4M3FN,
}


@dataclass(frozen=True)
class PassOptions:
    """`autocast` and `autocast_type` mean what the options --auto-cast and --auto-cast-type of neuronx-cc mean."""

    autocast: str = "none"
    autocast_type: str = "bf16"
    # The compiler's name of what is compiled for (`inf2`, `trn2`, ...); none means an ideal machine.
    target: str | None = None
    tensor_parallel: int = 1
    # The model's own plan: (pattern of modules, style) pairs such as ("layers.*.mlp.up_proj", "colwise").
    published_plan: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.autocast not in AUTOCAST_MODES:
            raise OptionsInvalid(f"autocast {self.autocast!r} is unknown; choose one of {', '.join(AUTOCAST_MODES)}")
        if self.autocast_type not in AUTOCAST_TYPES:
            allowed = ", ".join(AUTOCAST_TYPES)
            raise OptionsInvalid(f"autocast type {self.autocast_type!r} is unknown; choose one of {allowed}")
        if self.autocast != "none" and self.autocast_type == "fp8_e4m3" and self.target not in (None, *_E4M3):
            having = ", ".join(_E4M3)
            raise OptionsInvalid(f"target {self.target!r} has no fp8_e4m3 to cast to, as {having} have; take bf16")
        if self.tensor_parallel < 1:
            raise OptionsInvalid(f"a tensor-parallel degree of {self.tensor_parallel} is no number of ranks")

    @property
    def narrow(self) -> DType:
        """The type that float32 work is cast to."""
        general = AUTOCAST_TYPES[self.autocast_type]
        return _E4M3[self.target] if general is DType.FLOAT8_E4M3 and self.target is not None else general
