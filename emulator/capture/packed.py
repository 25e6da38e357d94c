"""Image towers that take an image as a sequence of patches with a table of image grids.

Their processors choose the grid by the size of a picture, so no configuration gives it; the grid decides shapes, so a
compiled program has exactly one. It is square: that of images of the configured size (224 by default), or the largest
that the position table holds. There is one picture for each row of the batch, and the grid is a constant of the
program.
"""

import inspect
import math
from typing import Any

import torch

from nxpipe.emulator.capture.request import CaptureRequest
from nxpipe.emulator.ir.types import DType, TensorType

PATCHES = "pixel_patches"
PATCH_MASK = "pixel_attention_mask"
# Frames, rows and columns of images whose patches are all in one row; rows and columns of images with a row for each.
_GRIDS = ("grid_thw", "image_grid_thw")
_SHAPES = "spatial_shapes"
_DEFAULT_IMAGE = 224
# Models that attend in windows cut their grid into these; two merged patches on a side is the least of the others.
_WINDOW_SIDE = 2


def hold_grid(model: Any, batch: int) -> None:
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
