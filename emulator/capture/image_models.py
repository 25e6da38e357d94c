"""Image models with a call signature of their own: towers that take patches with a table of grids, and diffusers.

Their processors choose the grid by the size of a picture, so no configuration gives it; the grid decides shapes, so a
compiled program has exactly one. It is square: that of images of the configured size (224 by default), or the largest
that the position table holds. There is one picture for each row of the batch, and the grid is a constant of the
program.
"""

import importlib
import inspect
import math
from typing import Any

import torch

from nxpipe.emulator.capture.budget import bounded, require_modest_settings
from nxpipe.emulator.capture.request import TASKS, CaptureRequest
from nxpipe.emulator.configuration import relevant
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.types import DType, TensorType

PATCHES = "pixel_patches"
PATCH_MASK = "pixel_attention_mask"
# Frames, rows and columns of images whose patches are all in one row; rows and columns of images with a row for each.
_GRIDS = ("grid_thw", "image_grid_thw")
_SHAPES = "spatial_shapes"
_DEFAULT_IMAGE = 224
# Models that attend in windows cut their grid into these; two merged patches on a side is the least of the others.
_WINDOW_SIDE = 2


def bind_patch_grid(model: Any, batch: int) -> None:
    """Give a model that asks for patches and their grid the grid, so that it asks for the patches alone."""
    taken = inspect.signature(model.forward).parameters
    required = [name for name, one in taken.items() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    if len(required) == 2 and required[1] in _GRIDS:
        _leave_patches(model, required[0], required[1], [[1, *_grid(model.config)]] * batch)
    elif _SHAPES in taken and "pixel_values" in taken and _tower(model.config) is not None:
        _leave_patches(model, "pixel_values", _SHAPES, [_grid(model.config)] * batch)


def _leave_patches(model: Any, patches: str, grid: str, rows: list[Any]) -> None:
    inner, signature = model.forward, inspect.signature(model.forward)

    def forward(**given: Any) -> Any:
        given[patches] = given.pop(PATCHES)
        return inner(**given, **{grid: torch.tensor(rows)})

    needed = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (PATCHES, PATCH_MASK)]
    others = [one for name, one in signature.parameters.items() if name not in (patches, grid, PATCH_MASK)]
    optional = [one for one in others if one.kind is one.POSITIONAL_OR_KEYWORD]
    kept = needed if PATCH_MASK in signature.parameters else needed[:1]
    model.forward, forward.__signature__ = forward, signature.replace(parameters=[*kept, *optional])  # type: ignore[attr-defined]
    if model.main_input_name == patches or not optional:
        model.main_input_name = PATCHES


def patches_type(config: Any, request: CaptureRequest) -> TensorType:
    """Each patch flat: channels, frames, rows, columns."""
    tower = _tower(config)
    height, width = _grid(config)
    named = (getattr(tower, name, None) for name in ("in_channels", "in_chans", "num_channels"))
    channels = next((number for number in named if number is not None), 3)
    numbers = channels * int(getattr(tower, "temporal_patch_size", 1)) * tower.patch_size**2
    rows = (request.batch, height * width) if _has_table(tower) else (request.batch * height * width,)
    return TensorType((*rows, numbers), DType.FLOAT32)


def patch_mask_type(config: Any, request: CaptureRequest) -> TensorType:
    """Which patches of each image are none, because it is smaller than the others."""
    height, width = _grid(config)
    return TensorType((request.batch, height * width), DType.INT64)


def _tower(config: Any) -> Any:
    """The configuration of the part that sees."""
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})))
    return next((part for part in parts if isinstance(getattr(part, "patch_size", None), int)), None)


def _has_table(tower: Any) -> bool:
    return isinstance(getattr(tower, "num_patches", None), int) and not hasattr(tower, "spatial_merge_size")


def _grid(config: Any) -> tuple[int, int]:
    """Patches down and across, a whole number of merged ones."""
    tower = _tower(config)
    if _has_table(tower):
        side = math.isqrt(tower.num_patches)
        return side, side
    size = getattr(tower, "image_size", None)
    unit = int(getattr(tower, "spatial_merge_size", None) or 1) * _WINDOW_SIDE
    side = int(size if isinstance(size, int) else _DEFAULT_IMAGE) // int(tower.patch_size) // unit * unit
    return side, side


# What Stable Diffusion XL says about size and place of an image, one number each.
_SIZE_NUMBERS = 6


def build_diffusion_model(request: CaptureRequest) -> Any:
    """The model on the meta device, in evaluation mode."""
    name = TASKS[request.task]
    found = request.config.get("_class_name")
    if found != name:
        raise CaptureError(f"task {request.task!r} is for a {name}, but the configuration is of a {found}")
    kind = type(name, (DIFFUSION[request.task], getattr(_library(), name)), {})
    require_modest_settings(request.config)
    settings = {key: value for key, value in relevant(request.config).items() if not key.startswith("_")}
    try:
        with bounded(), torch.device("meta"), torch.no_grad():
            # PyTorch's own `to`: diffusers' warns about layers that checkpoints keep in float32.
            return torch.nn.Module.to(kind(**settings), getattr(torch, request.dtype)).eval()
    except Exception as fault:  # third-party code: whatever it raises is a reason why there is no model
        raise CaptureError(f"{name} cannot be built from this configuration: {fault}") from fault


def _library() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError:
        raise CaptureError("a diffusion model needs the diffusers library: pip install 'nxpipe[diffusion]'") from None


class _Untied:
    def tie_weights(self) -> None:
        """transformers' models are told to; here no weight is another's."""


class _Denoising(_Untied):
    """Text and size conditions of Stable Diffusion XL come as tensors of their own, not inside a dictionary."""

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, text_embeds: Any = None, time_ids: Any = None
    ) -> Any:
        added = None if text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        result = super().forward(  # type: ignore[misc]
            sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False
        )
        return {"prediction": result[0]}  # not `sample`: what comes out as it went in would be taken for state


class _Encoding(_Untied):
    """Mean and logarithm of the variance: what to draw from them is for the host."""

    def forward(self, sample: Any) -> Any:
        return {"parameters": self.encode(sample).latent_dist.parameters}  # type: ignore[attr-defined]


class _Decoding(_Untied):
    def forward(self, latents: Any) -> Any:
        return {"sample": self.decode(latents, return_dict=False)[0]}  # type: ignore[attr-defined]


DIFFUSION = {"image-denoising": _Denoising, "image-encoding": _Encoding, "image-decoding": _Decoding}


def diffusion_input_types(model: Any, request: CaptureRequest) -> dict[str, TensorType]:
    """Sizes are those that the model was trained for."""
    settings, batch = model.config, request.batch
    size = settings.sample_size

    def floats(*shape: int) -> TensorType:
        return TensorType((batch, *shape), DType(request.dtype))

    if request.task == "image-encoding":
        return {"sample": floats(settings.in_channels, size, size)}
    if request.task == "image-decoding":
        latent = size // 2 ** (len(settings.block_out_channels) - 1)
        return {"latents": floats(settings.latent_channels, latent, latent)}
    types = {
        "sample": floats(settings.in_channels, size, size),
        "timestep": TensorType((batch,), DType.FLOAT32),
        "encoder_hidden_states": floats(request.sequence, settings.cross_attention_dim),
    }
    if settings.addition_embed_type == "text_time":
        known = settings.projection_class_embeddings_input_dim - _SIZE_NUMBERS * settings.addition_time_embed_dim
        types |= {"text_embeds": floats(known), "time_ids": floats(_SIZE_NUMBERS)}
    return types
