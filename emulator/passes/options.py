"""The options that change what passes do."""

from dataclasses import dataclass

from emulator.errors import OptionsInvalid
from emulator.types import DType

AUTOCAST_MODES = ("none", "matmult", "all")
AUTOCAST_TYPES = {
    "bf16": DType.BFLOAT16,
    "fp16": DType.FLOAT16,
    "tf32": DType.TFLOAT32,
    "fp8_e4m3": DType.FLOAT8_E4M3,
}
# The compiler's targets that have the standard's E4M3, up to 448, in place of their own, up to 240.
_STANDARD_E4M3 = ("trn3",)


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
        if self.tensor_parallel < 1:
            raise OptionsInvalid(f"a tensor-parallel degree of {self.tensor_parallel} is no number of ranks")

    @property
    def narrow(self) -> DType:
        """The type that float32 work is cast to."""
        if self.autocast_type == "fp8_e4m3" and self.target in _STANDARD_E4M3:
            return DType.FLOAT8_E4M3FN
        return AUTOCAST_TYPES[self.autocast_type]
