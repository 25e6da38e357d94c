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
# The E4M3 type of each compiler target: the standard type ends at 448, that of older targets at 240.
_E4M3 = {
    "inf2": DType.FLOAT8_E4M3,
    "trn1": DType.FLOAT8_E4M3,
    "trn1n": DType.FLOAT8_E4M3,
    "trn2": DType.FLOAT8_E4M3,
    "trn3": DType.FLOAT8_E4M3FN,
}


@dataclass(frozen=True)
class PassOptions:
    """Options of the passes. `autocast` and `autocast_type` are --auto-cast and --auto-cast-type of neuronx-cc."""

    autocast: str = "none"
    autocast_type: str = "bf16"
    # The compiler target (`inf2`, `trn2`, ...); None for an ideal machine, which has every type.
    target: str | None = None
    tensor_parallel: int = 1
    # The model's published tensor-parallel plan: (module pattern, style), such as ("layers.*.mlp.up_proj", "colwise").
    published_plan: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.autocast not in AUTOCAST_MODES:
            raise OptionsInvalid(f"autocast {self.autocast!r} is unknown; choose one of {', '.join(AUTOCAST_MODES)}")
        if self.autocast_type not in AUTOCAST_TYPES:
            allowed = ", ".join(AUTOCAST_TYPES)
            raise OptionsInvalid(f"autocast type {self.autocast_type!r} is unknown; choose one of {allowed}")
        if self.autocast != "none" and self.autocast_type == "fp8_e4m3" and self.target not in (None, *_E4M3):
            targets = ", ".join(_E4M3)
            raise OptionsInvalid(f"target {self.target!r} has no fp8_e4m3; use bf16, or one of the targets {targets}")
        if self.tensor_parallel < 1:
            raise OptionsInvalid(f"the tensor-parallel degree is {self.tensor_parallel}; use 1 or more")

    @property
    def narrow(self) -> DType:
        """The element type that float32 values are cast to."""
        general = AUTOCAST_TYPES[self.autocast_type]
        return _E4M3[self.target] if general is DType.FLOAT8_E4M3 and self.target is not None else general
