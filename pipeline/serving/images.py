"""Images as a model reads them, by the preprocessor_config.json of its artifact: resized, cropped, scaled, normalized.

The steps are those of transformers' image processors, in their order, with Pillow's resampling and without
transformers. A setting that would change the values and is not known is refused.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nxpipe.pipeline.serving.text import Files, json_object
from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware, ModelSourceError

if TYPE_CHECKING:
    from PIL.Image import Image

    from nxpipe.emulator.numerics import Array

SETTINGS: Final = "preprocessor_config.json"
_STEPS: Final = frozenset({"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"})
_BILINEAR: Final = 2  # Pillow's number, which the files have


class ImageProcessor:
    """The processor of a model's images."""

    def __init__(self, model: str, files: Files) -> None:
        self._model = model
        self._settings = json_object(model, files, SETTINGS)
        if not self._settings:
            raise InputInvalid(
                f"{model}: the artifact has no {SETTINGS}, so it reads arrays alone; pass pixel_values, or save the "
                "processor beside the model with save_pretrained(), and build the model again"
            )
        unknown = sorted(
            name for name, value in self._settings.items() if value and name.startswith("do_") and name not in _STEPS
        )
        unknown += ["crop_pct"] if self._settings.get("crop_pct") else []
        if unknown:
            raise InputInvalid(f"{model}: {SETTINGS}: {unknown[0]} is not supported; pass pixel_values")

    def pixel_values(self, image: "Image | Array") -> "Array":
        """An image of Pillow, or an array of height, width and channels of 8 bits, as channels, height and width."""
        drawn = _as_image(image)
        if self._is_on("do_resize"):
            drawn = self._resized(drawn)
        pixels = np.asarray(drawn, np.uint8)
        if self._is_on("do_center_crop"):
            pixels = _center_crop(pixels, *self._size("crop_size"))
        values = pixels.astype(np.float32)
        if self._is_on("do_rescale"):
            values = values * np.float32(self._settings.get("rescale_factor", 1 / 255))
        if self._is_on("do_normalize"):
            mean, deviation = self._channels("image_mean"), self._channels("image_std")
            values = ((values - mean) / deviation).astype(np.float32)
        return values.transpose(2, 0, 1).astype(np.float32)

    def _is_on(self, step: str) -> bool:
        return bool(self._settings.get(step))

    def _resized(self, image: "Image") -> "Image":
        resample, size = self._settings.get("resample", _BILINEAR), self._settings.get("size")
        edge = size.get("shortest_edge") if isinstance(size, Mapping) else None
        if isinstance(edge, int):
            shorter, longer = sorted(image.size)
            scaled = int(edge * longer / shorter)
            wanted = (edge, scaled) if image.width <= image.height else (scaled, edge)
        else:
            height, width = self._size("size")
            wanted = (width, height)
        return image.resize(wanted, resample)

    def _size(self, name: str) -> tuple[int, int]:
        """Height and width."""
        match self._settings.get(name):
            case int(edge):
                return edge, edge
            case {"height": int(height), "width": int(width)}:
                return height, width
            case other:
                raise ModelSourceError(f"{self._model}: {SETTINGS}: {name} is {other!r}; pass pixel_values")

    def _channels(self, name: str) -> "Array":
        figures = self._settings.get(name)
        if not isinstance(figures, list) or len(figures) != 3:
            raise ModelSourceError(f"{self._model}: {SETTINGS}: {name} is {figures!r}; pass pixel_values")
        return np.array(figures, np.float32)


def is_image(value: Any) -> bool:
    """Whether a value is an image of Pillow, or an array of one."""
    return hasattr(value, "getbands") or (isinstance(value, np.ndarray) and value.ndim in (2, 3))


def _as_image(image: "Image | Array") -> "Image":
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingSoftware("pillow", "Reading images", "run: pip install pillow") from error
    if not isinstance(image, np.ndarray):
        return image.convert("RGB")
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise InputInvalid(
            f"image: {image.dtype} of shape {list(image.shape)}; pass 8 bits of height, width and 1, 3 or 4 channels"
        )
    return Image.fromarray(image.squeeze(2) if image.ndim == 3 and image.shape[2] == 1 else image).convert("RGB")


def _center_crop(pixels: "Array", height: int, width: int) -> "Array":
    """The middle of an image; a smaller one is filled up with black."""
    missing = [max(height - pixels.shape[0], 0), max(width - pixels.shape[1], 0)]
    before = [(count + 1) // 2 for count in missing]
    around = [(own, count - own) for own, count in zip(before, missing, strict=True)]
    padded = np.pad(pixels, [*around, (0, 0)])
    top, left = (padded.shape[0] - height) // 2, (padded.shape[1] - width) // 2
    cropped: Array = padded[top : top + height, left : left + width]
    return cropped
