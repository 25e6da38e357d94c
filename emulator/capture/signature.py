"""What a model is called with: names from its own `forward`, sizes from its configuration and the request.

`sequence` counts tokens where a model reads text, and frames where it only listens: enough samples or spectra are
given for that many. An encoder-decoder is one program: its decoder reads `decoder_input_ids` of the same length.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nxpipe.emulator.capture.diffusion import DIFFUSION, diffusion_input_types
from nxpipe.emulator.capture.packed import PATCH_MASK, PATCHES, patch_mask_type, patches_type
from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.types import DType, TensorType

_DEFAULT_IMAGE = 224
_IMAGE_SIZES = ("image_size", "input_size", "img_size")
_CHANNELS = ("num_channels", "in_channels", "in_chans")
# Settings by which a text model finds the places that images take in its text; without images it just reads text.
_PLACEHOLDERS = ("image_token_id", "image_token_index", "media_placeholder_token_id")


def input_types(model: Any, request: CaptureRequest) -> dict[str, TensorType]:
    """The tensors that one forward pass of this model takes, in the order of its signature."""
    if request.task in DIFFUSION:
        return diffusion_input_types(model, request)
    accepted = inspect.signature(model.forward).parameters
    wanted = _wanted(model, accepted)
    for name, parameter in accepted.items():
        required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if name not in _TYPES and (name in wanted or required):
            raise CaptureError(f"{type(model).__name__} needs an input {name!r}, whose shape no configuration tells")
        if required:
            wanted.add(name)
    types = {name: _TYPES[name](model.config, request) for name in accepted if name in wanted}
    return {name: type_.with_dtype(_carried(type_, request)) for name, type_ in types.items()}


def _wanted(model: Any, accepted: Iterable[str]) -> set[str]:
    """The model's main input, and what has to come with it."""
    main = model.main_input_name
    wanted = {main} if isinstance(main, str) else set(main)
    if "input_ids" in accepted and "pixel_values" in accepted and not _is_language_model_with_eyes(model.config):
        wanted |= {"input_ids", "pixel_values"}
    if "input_ids" in accepted and "input_features" in accepted and hasattr(model.config, "projection_dim"):
        wanted |= {"input_ids", "input_features"}  # a text and an audio tower side by side
    if "input_ids" in wanted:
        wanted |= {"attention_mask", "bbox"}
    if "input_features" in wanted:
        wanted.add("input_features_mask")
    if model.config.is_encoder_decoder or "input_ids" not in accepted:
        wanted.add("decoder_input_ids")
    return wanted & set(accepted)


def _is_language_model_with_eyes(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in _PLACEHOLDERS)


def _carried(type_: TensorType, request: CaptureRequest) -> DType:
    """Floats come in the type that the model's weights have."""
    return DType(request.dtype) if type_.dtype.is_float else type_.dtype


def _tokens(config: Any, request: CaptureRequest) -> TensorType:
    return TensorType((request.batch, request.sequence), DType.INT64)


def _boxes(config: Any, request: CaptureRequest) -> TensorType:
    return TensorType((request.batch, request.sequence, 4), DType.INT64)


def _image(config: Any, request: CaptureRequest) -> TensorType:
    height, width = _pair(_setting(config, _IMAGE_SIZES, _DEFAULT_IMAGE))
    return TensorType((request.batch, int(_setting(config, _CHANNELS, 3)), height, width), DType.FLOAT32)


def _video(config: Any, request: CaptureRequest) -> TensorType:
    image = _image(config, request)
    frames = int(_setting(config, ("num_frames", "frames_per_clip"), 16))
    return image.with_shape((image.shape[0], frames, *image.shape[1:]))


def _image_or_video(config: Any, request: CaptureRequest) -> TensorType:
    watches = getattr(config, "num_frames", None) and hasattr(config, "tubelet_size")
    return _video(config, request) if watches else _image(config, request)


def _waveform(config: Any, request: CaptureRequest) -> TensorType:
    """Raw samples; or, for models of spectrograms, all of the one that the configuration fixes."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return TensorType((request.batch, config.max_length, config.num_mel_bins), DType.FLOAT32)
    samples = _samples(config, request.sequence)
    channels = _setting(config, ("audio_channels", "num_channels"), None)
    shape = (request.batch, samples) if channels is None else (request.batch, int(channels), samples)
    return TensorType(shape, DType.FLOAT32)


def _samples(config: Any, frames: int) -> int:
    """The fewest samples from which the convolutions in front make this many frames."""
    kernels, strides = getattr(config, "conv_kernel", None), getattr(config, "conv_stride", None)
    if isinstance(kernels, Sequence) and isinstance(strides, Sequence):
        for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
            frames = (frames - 1) * stride + kernel
        return frames
    hop = getattr(config, "hop_length", None)
    return frames * (hop if isinstance(hop, int) else 320)


def _spectrogram(config: Any, request: CaptureRequest) -> TensorType:
    """Models that position each frame fix their number; they halve it once. The others take any number."""
    mels = _setting(config, ("num_mel_bins", "feature_size"), None)
    if _setting(config, ("spec_size",), None):
        return TensorType((request.batch, 1, 1024, int(mels or 64)), DType.FLOAT32)
    if _is_fixed(config):
        frames = 2 * int(_setting(config, ("max_source_positions",), None))
        return TensorType((request.batch, int(mels), frames), DType.FLOAT32)
    width = _setting(config, ("feature_projection_input_dim", "input_feat_per_channel", "input_dim"), mels or 80)
    return TensorType((request.batch, request.sequence, int(width)), DType.FLOAT32)


def _is_fixed(config: Any) -> bool:
    known = _setting(config, ("max_source_positions",), None) and _setting(
        config, ("num_mel_bins", "feature_size"), None
    )
    return bool(known) and not hasattr(config, "input_feat_per_channel")


def _frames(config: Any, request: CaptureRequest) -> TensorType:
    """Which frames of a spectrogram are sound."""
    batch, *sizes = _spectrogram(config, request).shape
    return TensorType((batch, max(sizes) if len(sizes) == 2 and _is_fixed(config) else sizes[0]), DType.INT64)


def _series(config: Any, request: CaptureRequest) -> TensorType:
    length, channels = getattr(config, "context_length", None), getattr(config, "num_input_channels", None)
    if length is None or channels is None:
        raise CaptureError(f"a {config.model_type!r} configuration does not tell the shape of its 'past_values'")
    return TensorType((request.batch, int(length), int(channels)), DType.FLOAT32)


def _setting(config: Any, names: Sequence[str], default: Any) -> Any:
    """The first of these settings that the configuration, or one of the configurations inside it, has."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    for owner in (config, *inner):
        for name in names:
            found = getattr(owner, name, None)
            if found is not None:
                return found
    return default


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        return int(size["height"]), int(size["width"])
    if isinstance(size, Sequence):
        return int(size[-2] if len(size) > 1 else size[0]), int(size[-1])
    return int(size), int(size)


_TYPES: dict[str, Callable[[Any, CaptureRequest], TensorType]] = {
    "input_ids": _tokens,
    "attention_mask": _tokens,
    "bbox": _boxes,
    "decoder_input_ids": _tokens,
    "pixel_values": _image_or_video,
    "pixel_values_videos": _video,
    "input_values": _waveform,
    "input_features": _spectrogram,
    "input_features_mask": _frames,
    "past_values": _series,
    PATCHES: patches_type,
    PATCH_MASK: patch_mask_type,
}
