"""Image models with other signatures than `pixel_values`: towers that take patches and grids, and diffusers models.

Their processors choose the patch grid by the image size, so no configuration gives it; the grid determines shapes, so a
compiled program has one grid, as a constant. It is square: that of images of the configured size (224 by default), or
the largest grid in the position table. Each row of the batch has one image.
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
# Inputs with [frames, rows, columns] of images whose patches are all in one row; with [rows, columns] of batched
# images.
_GRIDS = ("grid_thw", "image_grid_thw")
_SHAPES = "spatial_shapes"
_DEFAULT_IMAGE = 224
# Merged patches on a side of the grid: window attention needs whole windows, and other towers at least two.
_WINDOW_SIDE = 2


def bind_patch_grid(model: Any, batch: int) -> None:
    """Bind the grid in a model that takes patches and their grid, so that its forward takes only the patches."""
    accepted = inspect.signature(model.forward).parameters
    required = [name for name, p in accepted.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(required) == 2 and required[1] in _GRIDS:
        _bind_grid(model, required[0], required[1], [[1, *_grid(model.config)]] * batch)
    elif _SHAPES in accepted and "pixel_values" in accepted and _tower(model.config) is not None:
        _bind_grid(model, "pixel_values", _SHAPES, [_grid(model.config)] * batch)


def _bind_grid(model: Any, patches: str, grid: str, rows: list[Any]) -> None:
    inner, signature = model.forward, inspect.signature(model.forward)

    def forward(**arguments: Any) -> Any:
        arguments[patches] = arguments.pop(PATCHES)
        return inner(**arguments, **{grid: torch.tensor(rows)})

    required = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (PATCHES, PATCH_MASK)]
    others = [parameter for name, parameter in signature.parameters.items() if name not in (patches, grid, PATCH_MASK)]
    optional = [parameter for parameter in others if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    kept = required if PATCH_MASK in signature.parameters else required[:1]
    model.forward, forward.__signature__ = forward, signature.replace(parameters=[*kept, *optional])  # type: ignore[attr-defined]
    if model.main_input_name == patches or not optional:
        model.main_input_name = PATCHES


def patches_type(config: Any, request: CaptureRequest) -> TensorType:
    """The type of the patches, each flattened from [channels, frames, rows, columns]."""
    tower = _tower(config)
    height, width = _grid(config)
    settings = (getattr(tower, name, None) for name in ("in_channels", "in_chans", "num_channels"))
    channels = next((number for number in settings if number is not None), 3)
    numbers = channels * int(getattr(tower, "temporal_patch_size", 1)) * tower.patch_size**2
    rows = (request.batch, height * width) if _has_table(tower) else (request.batch * height * width,)
    return TensorType((*rows, numbers), DType.FLOAT32)


def patch_mask_type(config: Any, request: CaptureRequest) -> TensorType:
    """The type of the mask of padding patches, which images smaller than the grid have."""
    height, width = _grid(config)
    return TensorType((request.batch, height * width), DType.INT64)


def _tower(config: Any) -> Any:
    """The configuration of the vision tower."""
    parts = (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})))
    return next((part for part in parts if isinstance(getattr(part, "patch_size", None), int)), None)


def _has_table(tower: Any) -> bool:
    return isinstance(getattr(tower, "num_patches", None), int) and not hasattr(tower, "spatial_merge_size")


def _grid(config: Any) -> tuple[int, int]:
    """Rows and columns of patches, a multiple of the merged patches."""
    tower = _tower(config)
    if _has_table(tower):
        side = math.isqrt(tower.num_patches)
        return side, side
    size = getattr(tower, "image_size", None)
    unit = int(getattr(tower, "spatial_merge_size", None) or 1) * _WINDOW_SIDE
    side = int(size if isinstance(size, int) else _DEFAULT_IMAGE) // int(tower.patch_size) // unit * unit
    return side, side


# Numbers in the size and crop condition of Stable Diffusion XL.
_SIZE_NUMBERS = 6


def build_diffusion_model(request: CaptureRequest) -> Any:
    """The model on the meta device, in evaluation mode."""
    name = TASKS[request.task]
    configured = request.config.get("_class_name")
    if configured != name:
        raise CaptureError(f"task {request.task!r} is for a {name}, but the configuration is of a {configured}")
    kind = type(name, (DIFFUSION[request.task], getattr(_library(), name)), {})
    require_modest_settings(request.config)
    settings = {key: value for key, value in relevant(request.config).items() if not key.startswith("_")}
    try:
        with bounded(), torch.device("meta"), torch.no_grad():
            # torch.nn.Module.to, because that of diffusers warns about layers that checkpoints keep in float32.
            return torch.nn.Module.to(kind(**settings), getattr(torch, request.dtype)).eval()
    except Exception as fault:  # third-party code may raise any exception
        raise CaptureError(f"{name} cannot be built from this configuration: {fault}") from fault


def _library() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError:
        raise CaptureError("a diffusion model needs the diffusers library: pip install 'nxpipe[diffusion]'") from None


class _WithoutTies:
    def tie_weights(self) -> None:
        """Do nothing: diffusers models have no tied weights; the caller ties those of transformers models."""


class _Denoising(_WithoutTies):
    """A UNet whose text and size conditions (Stable Diffusion XL) are separate inputs, not a dictionary."""

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, text_embeds: Any = None, time_ids: Any = None
    ) -> Any:
        added = None if text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        result = super().forward(  # type: ignore[misc]
            sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False
        )
        return {"prediction": result[0]}  # not `sample`: an output with an input's name is a state


class _Encoding(_WithoutTies):
    """The encoder's mean and log variance; the host samples the latents."""

    def forward(self, sample: Any) -> Any:
        return {"parameters": self.encode(sample).latent_dist.parameters}  # type: ignore[attr-defined]


class _Decoding(_WithoutTies):
    def forward(self, latents: Any) -> Any:
        return {"sample": self.decode(latents, return_dict=False)[0]}  # type: ignore[attr-defined]


DIFFUSION = {"image-denoising": _Denoising, "image-encoding": _Encoding, "image-decoding": _Decoding}


def diffusion_input_types(model: Any, request: CaptureRequest) -> dict[str, TensorType]:
    """The inputs of a diffusion model, at the image size of its training."""
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
        width = settings.projection_class_embeddings_input_dim - _SIZE_NUMBERS * settings.addition_time_embed_dim
        types |= {"text_embeds": floats(width), "time_ids": floats(_SIZE_NUMBERS)}
    return types
