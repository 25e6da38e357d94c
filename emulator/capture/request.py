"""Capture request: a model's configuration and the static shapes to trace it with; and the type of its results."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.numerics import Array

# Hugging Face's task names, and the transformers class that turns a configuration into a model for each.
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
_PHASES = ("forward", "prefill", "decode")
_DTYPES = ("float32", "bfloat16", "float16")
# A model that has this setting knows how far tokens are apart, at any length, whatever else its configuration says.
_BY_DISTANCE = "relative_attention_num_buckets"


@dataclass(frozen=True)
class CaptureRequest:
    """One static-shape capture. `config` is the parsed config.json of the model.

    Phase `forward` reads `sequence` tokens and keeps nothing. `prefill` reads as many and fills a key-value cache of
    `capacity` places, by default just as many. `decode` reads one token beside a cache of `sequence` places.
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
        if self.capacity is not None and (self.phase != "prefill" or self.capacity < self.sequence):
            raise CaptureError(
                f"a capacity of {self.capacity} was asked for in phase {self.phase!r} of {self.sequence} tokens; only "
                "a prefill has one, at least as large as its sequence"
            )
        self._require_length_known_to_model()

    @property
    def has_cache(self) -> bool:
        """Whether the program reads and writes a key-value cache."""
        return self.phase in ("prefill", "decode")

    @property
    def cache_length(self) -> int:
        """How many tokens the cache has room for."""
        return self.sequence if self.capacity is None else self.capacity

    def _require_one_of(self, what: str, found: str, allowed: tuple[str, ...]) -> None:
        if found not in allowed:
            raise CaptureError(f"{what} {found!r} is unknown; choose one of {', '.join(allowed)}")

    def _require_length_known_to_model(self) -> None:
        # Under this name or that, the length of the table of positions; beyond it a lookup reads garbage.
        reads = self.config.get("text_config")
        for config in (self.config, reads if isinstance(reads, Mapping) else {}):
            for key in ("max_position_embeddings", "n_positions"):
                longest = None if _BY_DISTANCE in config else config.get(key)
                if isinstance(longest, int) and self.cache_length > longest:
                    raise CaptureError(f"sequence {self.cache_length} is longer than the model's {key} of {longest}")


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs by name, and what each layer gave, by the layer's module path, where that was watched."""

    outputs: Mapping[str, Array]
    layers: Mapping[str, Array]
