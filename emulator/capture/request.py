"""What to capture: a model's own configuration, and the static shapes to trace it with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emulator.errors import CaptureError

# Hugging Face's task names, and the transformers class that turns a configuration into a model for each.
TASKS: Mapping[str, str] = {
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
}
_PHASES = ("forward", "prefill")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class CaptureRequest:
    """One static-shape capture. `config` is the parsed config.json of the model."""

    config: Mapping[str, object] = field(hash=False)
    task: str
    phase: str
    batch: int
    sequence: int
    dtype: str

    def __post_init__(self) -> None:
        self._require_one_of("task", self.task, tuple(TASKS))
        self._require_one_of("phase", self.phase, _PHASES)
        self._require_one_of("dtype", self.dtype, _DTYPES)
        if self.batch < 1 or self.sequence < 1:
            raise CaptureError(f"batch {self.batch} and sequence {self.sequence} must both be at least 1")
        if self.phase == "prefill" and self.task != "text-generation":
            raise CaptureError(f"phase 'prefill' belongs to task 'text-generation'; use 'forward' for {self.task!r}")
        self._require_length_known_to_model()

    def _require_one_of(self, what: str, found: str, allowed: tuple[str, ...]) -> None:
        if found not in allowed:
            raise CaptureError(f"{what} {found!r} is unknown; choose one of {', '.join(allowed)}")

    def _require_length_known_to_model(self) -> None:
        # Under this name or that, the length of the table of positions; beyond it a lookup reads garbage.
        for key in ("max_position_embeddings", "n_positions"):
            longest = self.config.get(key)
            if isinstance(longest, int) and self.sequence > longest:
                raise CaptureError(f"sequence {self.sequence} is longer than the model's {key} of {longest}")
