"""Model configuration, a config.json: task, non-finite floats, first layers; and the shapes of the model's programs.

Transformers writes Infinity and NaN, which JSON lacks, as bare words or as `{"__float__": "Infinity"}`. The second form
is JSON and is read back as a number; cache keys and published files use it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nxpipe.pipeline.config.models import DEFAULT_PHASES
from nxpipe.pipeline.util.errors import ModelSourceError

_DEFAULT_TASK = "feature-extraction"
_BY_SUFFIX = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForImageClassificationWithTeacher": "image-classification",
    "ForObjectDetection": "object-detection",
    "ForSemanticSegmentation": "image-segmentation",
    "ForDepthEstimation": "depth-estimation",
    "ForAudioClassification": "audio-classification",
    "ForCTC": "automatic-speech-recognition",
    "ForSpeechToText": "automatic-speech-recognition",
    "UNet2DConditionModel": "image-denoising",
    "AutoencoderKL": "image-decoding",
}
# Settings of audio models: of spectrograms, or of convolutions over samples.
_AUDIO_SETTINGS = ("num_mel_bins", "input_feat_per_channel", "feat_extract_norm")
_AUDIO_TASKS = {
    "text2text-generation": "automatic-speech-recognition",
    "text-classification": "audio-classification",
}


def task_of(config: Mapping[str, object]) -> str:
    """The task of the class that the configuration names; feature extraction without one."""
    architectures = config.get("architectures", config.get("_class_name"))
    named = architectures if isinstance(architectures, list) else [architectures]
    name = str(named[0]) if named else ""
    task = next((task for suffix, task in _BY_SUFFIX.items() if name.endswith(suffix)), _DEFAULT_TASK)
    if name.endswith("ForConditionalGeneration") and _generates_from_text(config):
        task = "text2text-generation"
    return _AUDIO_TASKS.get(task, task) if any(setting in config for setting in _AUDIO_SETTINGS) else task


def _generates_from_text(config: Mapping[str, object]) -> bool:
    """The class generates from a sequence; models of several parts generate from an image."""
    setting = config.get("is_encoder_decoder")
    return bool(setting) if setting is not None else not any(key.endswith("_config") for key in config)


_TAG: Final = "__float__"
_FLOAT_OF_TAG: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def decode_floats(value: object) -> object:
    """A value as read from a file, with its tagged floats as numbers."""
    if isinstance(value, dict):
        tag = value.get(_TAG) if len(value) == 1 else None
        return (
            _FLOAT_OF_TAG[tag]
            if isinstance(tag, str) and tag in _FLOAT_OF_TAG
            else {k: decode_floats(v) for k, v in value.items()}
        )
    return [decode_floats(part) for part in value] if isinstance(value, list) else value


def encode_floats(value: object) -> object:
    """The same value as JSON, with non-finite floats as tags."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: encode_floats(part) for key, part in value.items()}
    return [encode_floats(part) for part in value] if isinstance(value, list | tuple) else value


# Configuration keys for the number of layers, which depend on the model family.
_DEPTHS: Final = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)
# Configuration keys for the number of layers of each stage.
_STAGES: Final = ("depths", "layers_per_block")
# Lists that describe the convolutions in front of the layers.
_IN_FRONT: Final = "conv_"


def first_layers(config: Mapping[str, object], count: int) -> dict[str, object]:
    """The configuration of the first `count` layers, or of the first `count` of each stage.

    Lists with an entry for each layer (`layer_types`) are truncated with them.
    """
    depths = {value for key, value in config.items() if key in _DEPTHS and isinstance(value, int)}
    inner = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)}
    cut: dict[str, object] = {key: first_layers(value, count) for key, value in inner.items() if _has_depth(value)}
    cut |= {key: _at_most(value, count) for key, value in config.items() if key in _STAGES}
    if "attention_types" in config:
        cut["attention_types"] = _first_of_runs(config["attention_types"], count)
    if not depths and not cut:
        raise ModelSourceError("--slice-layers: the configuration has no number of layers")
    sliced = dict(config) | cut
    for key, value in config.items():
        if key in _DEPTHS and isinstance(value, int):
            sliced[key] = min(value, count)
        elif isinstance(value, list) and len(value) in depths and key not in cut and not key.startswith(_IN_FRONT):
            sliced[key] = value[:count]
    return sliced


def _at_most(layers: object, count: int) -> object:
    """A number of layers, or a list of them by stage, each limited to `count`."""
    if isinstance(layers, list | tuple):
        return [_at_most(layer, count) for layer in layers]
    return min(layers, count) if isinstance(layers, int) else layers


def _first_of_runs(runs: object, count: int) -> object:
    """GPT-Neo's layer types: a pattern, and how often it is repeated."""
    match runs:
        case [[list(pattern), int(times)]]:
            return [[(pattern * times)[:count], 1]]
    return runs


def _has_depth(config: Mapping[str, object]) -> bool:
    return any(isinstance(config.get(key), int) for key in _DEPTHS) or any(key in config for key in _STAGES)


_WITH_CACHE: Final = ("prefill", "extend", "decode")
_PHASES: Final = {"text-generation": _WITH_CACHE}
_LATER: Final = ("extend", "decode")  # they continue what a prefill has left in the KV cache
SAVED_PROGRAM: Final = "program"  # the phase of a program in a file, which has shapes of its own


@dataclass(frozen=True, order=True)
class Shape:
    """One program: its phase and its static shapes. A saved program has the shapes of its file."""

    phase: str
    batch: int
    sequence: int

    @property
    def name(self) -> str:
        return self.phase if self.phase == SAVED_PROGRAM else f"{self.phase}-b{self.batch}-s{self.sequence}"

    @property
    def begins_text(self) -> bool:
        """True if the program reads a text from its start; an extend and a decode go on behind a prefill."""
        return self.phase not in _LATER


def shapes_of(phases: Iterable[str], batches: Iterable[int], buckets: Sequence[int]) -> tuple[Shape, ...]:
    """A program for each phase, batch and bucket; one decode program serves all buckets, which share a KV cache.

    The longest bucket is the length of that cache, so an extend, which reads chunks, has the shorter buckets, if any.
    """
    ordered = sorted(set(buckets))
    lengths = {"decode": ordered[-1:], "extend": ordered[:-1] or ordered}
    shapes = (
        Shape(phase, batch, length) for phase in phases for batch in batches for length in lengths.get(phase, buckets)
    )
    return tuple(dict.fromkeys(shapes))


def cache_capacity(shape: Shape, siblings: Iterable[Shape]) -> int | None:
    """Tokens that the KV cache of a prefill or an extend holds; None where the program's own sequence length decides.

    All such programs and the decode of one batch size share a cache as long as the longest of them: whichever prefill
    a prompt fits into, decode continues with the cache that it left.
    """
    sharing = [
        sibling.sequence for sibling in siblings if sibling.phase in _WITH_CACHE and sibling.batch == shape.batch
    ]
    return max(sharing) if shape.phase in ("prefill", "extend") and sharing else None


def all_phases(task: str) -> tuple[str, ...]:
    """All phases that a model of this task can have."""
    return _PHASES.get(task, ("forward",))


def default_phases(task: str) -> tuple[str, ...]:
    """The phases of a model of this task whose specification names none."""
    return DEFAULT_PHASES.get(task, ("forward",))
