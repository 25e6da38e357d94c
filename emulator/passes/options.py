"""The options that change what passes do."""

from dataclasses import dataclass

from emulator.errors import OptionsInvalid
from emulator.types import DType

AUTOCAST_MODES = ("none", "matmult", "all")
AUTOCAST_TYPES = {"bf16": DType.BFLOAT16, "fp16": DType.FLOAT16, "tf32": DType.TFLOAT32}


@dataclass(frozen=True)
class PassOptions:
    """`autocast` and `autocast_type` mean what the options --auto-cast and --auto-cast-type of neuronx-cc mean."""

    autocast: str = "none"
    autocast_type: str = "bf16"

    def __post_init__(self) -> None:
        if self.autocast not in AUTOCAST_MODES:
            raise OptionsInvalid(f"autocast {self.autocast!r} is unknown; choose one of {', '.join(AUTOCAST_MODES)}")
        if self.autocast_type not in AUTOCAST_TYPES:
            allowed = ", ".join(AUTOCAST_TYPES)
            raise OptionsInvalid(f"autocast type {self.autocast_type!r} is unknown; choose one of {allowed}")

    @property
    def narrow(self) -> DType:
        """The type that float32 work is cast to."""
        return AUTOCAST_TYPES[self.autocast_type]
