"""Capture request: a model's configuration and the static shapes to trace it with; and the type of its results."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.numerics import Array

# Hugging Face's task names, and for each the transformers auto class or diffusers class of its models.
TASKS: Mapping[str, str] = {
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "zero-shot-image-classification": "AutoModelForZeroShotImageClassification",
    "image-feature-extraction": "AutoModel",
    "object-detection": "AutoModelForObjectDetection",
    "image-segmentation": "AutoModelForSemanticSegmentation",
    "depth-estimation": "AutoModelForDepthEstimation",
    "audio-classification": "AutoModelForAudioClassification",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
    "image-denoising": "UNet2DConditionModel",
    "image-encoding": "AutoencoderKL",
    "image-decoding": "AutoencoderKL",
}
_PHASES = ("forward", "prefill", "extend", "decode")
_WITH_CAPACITY = ("prefill", "extend")
_DTYPES = ("float32", "bfloat16", "float16")
# A model with this setting has relative positions, so its length is not limited by a position table.
_RELATIVE_POSITIONS = "relative_attention_num_buckets"


@dataclass(frozen=True)
class CaptureRequest:
    """One static-shape capture. `config` is the parsed config.json of the model.

    Phase `forward` reads `sequence` tokens and has no cache. `prefill` reads `sequence` tokens and fills a KV cache of
    `capacity` tokens, by default `sequence`. `decode` reads one token and a KV cache of `sequence` tokens. `extend`
    reads `sequence` tokens of one row behind those in a KV cache of `batch` rows and `capacity` tokens: the next chunk
    of a prompt, while the other rows keep theirs.
    """

    config: Mapping[str, object] = field(hash=False)
    task: str
    phase: str
    batch: int
    sequence: int
    dtype: str
    capacity: int | None = None

    def __post_init__(self) -> None:
        self._require_one_of("task", self.task, tuple(TASKS))
        self._require_one_of("phase", self.phase, _PHASES)
        self._require_one_of("dtype", self.dtype, _DTYPES)
        if self.batch < 1 or self.sequence < 1:
            raise CaptureError(f"batch {self.batch} and sequence {self.sequence} must both be at least 1")
        if self.has_cache and self.task != "text-generation":
            raise CaptureError(
                f"phase {self.phase!r} belongs to task 'text-generation'; use 'forward' for {self.task!r}"
            )
        if self.capacity is not None and (self.phase not in _WITH_CAPACITY or self.capacity < self.sequence):
            raise CaptureError(
                f"a capacity of {self.capacity} is invalid in phase {self.phase!r} of {self.sequence} tokens; only "
                f"{' and '.join(_WITH_CAPACITY)} have one, at least as large as the sequence"
            )
        self._require_supported_length()

    @property
    def has_cache(self) -> bool:
        """True if the program has a KV cache."""
        return self.phase in ("prefill", "extend", "decode")

    @property
    def cache_length(self) -> int:
        """The capacity of the KV cache, in tokens."""
        return self.sequence if self.capacity is None else self.capacity

    def _require_one_of(self, field: str, value: str, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise CaptureError(f"{field} {value!r} is unknown; choose one of {', '.join(allowed)}")

    def _require_supported_length(self) -> None:
        # The length of the position table has one of two names; a lookup beyond it would be out of range.
        text = self.config.get("text_config")
        for config in (self.config, text if isinstance(text, Mapping) else {}):
            for key in ("max_position_embeddings", "n_positions"):
                longest = None if _RELATIVE_POSITIONS in config else config.get(key)
                if isinstance(longest, int) and self.cache_length > longest:
                    raise CaptureError(f"sequence {self.cache_length} is longer than the model's {key} of {longest}")


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of one forward pass by name, and outputs of its layers by module path where they were recorded."""

    outputs: Mapping[str, Array]
    layers: Mapping[str, Array]
