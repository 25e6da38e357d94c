"""Where a model's weights come from: a seed, or a checkpoint. Tensors are made or read one at a time."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nxpipe.pipeline.models.checkpoint import SafetensorsWeights
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import expanded

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.ir.types import TensorType

_CHUNK = 1 << 16  # elements at a time: stays in the processor's cache
GENERATOR = 1  # goes into the request key: raise it when `random_tensor` changes a single bit


class Weights(Protocol):
    """A source of weights: what identifies it, and its tensors by name."""

    def identity(self) -> dict[str, object]:
        """What goes into the request key; cheap, and free of paths."""
        ...

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]": ...


class Tensors(Mapping[str, "np.ndarray[Any, Any]"]):
    """The tensors that a model wants, loaded when asked for and not kept: a 70B model must not fill the memory."""

    def __init__(self, source: Weights, kinds: Mapping[str, "TensorType"]) -> None:
        self._source = source
        self.kinds = kinds

    def __getitem__(self, name: str) -> "np.ndarray[Any, Any]":
        return self._source.load(name, self.kinds[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True)
class RandomWeights:
    """Weights made from a seed: the same on every machine, each tensor independent of all others."""

    seed: int

    def identity(self) -> dict[str, object]:
        return {"kind": "random", "seed": self.seed, "generator": GENERATOR}

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]":
        return random_tensor(self.seed, name, kind.shape, str(kind.dtype))


def random_tensor(seed: int, name: str, shape: tuple[int, ...], dtype: str) -> "np.ndarray[Any, Any]":
    """A bell-shaped tensor around 0 (scales of norms: around 1) with the usual spread of an untrained transformer.

    Made of Philox's raw bits, whose stream numpy promises never to change, by integer sums alone: neither numpy's
    release nor the processor can alter a bit. Four 16-bit lanes added have a standard deviation of 2**17 / sqrt(12).
    """
    import numpy as np

    key = int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:16], "little")
    stream = np.random.Philox(key=key)
    flat = np.empty(int(np.prod(shape, dtype=np.int64)), np.float32)
    even_lanes, lane = np.uint64(0x0000FFFF_0000FFFF), np.uint64(16)
    spread = np.float32(0.02 * 12**0.5 / 2**17)
    for start in range(0, flat.size, _CHUNK):
        bits = stream.random_raw(min(_CHUNK, flat.size - start))
        pairs = (bits & even_lanes) + ((bits >> lane) & even_lanes)  # two sums of two lanes in each word
        halves = pairs.astype("<u8", copy=False).view("<u4")
        chunk = flat[start : start + _CHUNK]
        np.subtract((halves[0::2] + halves[1::2]).view(np.int32), 2 * 0xFFFF, out=chunk, casting="unsafe")
        chunk *= spread
    if len(shape) == 1 and not name.endswith("bias"):
        flat += 1
    return flat.reshape(shape).astype(numpy_dtype(dtype), copy=False)


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """numpy's type for a name of ours; the narrow floats come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def parse_weights(text: str, model_folder: Path | None) -> Weights:
    """The weights that `--weights` (or `weights` in nxpipe.toml) names."""
    if match := re.fullmatch(r"random:(\d{1,18})", text):
        return RandomWeights(int(match[1]))
    if text.startswith("random"):
        raise ModelSourceError(f"--weights {text}: a seed must be a whole number, as in random:0")
    if text == "hub":
        if model_folder is None:
            raise ModelSourceError("--weights hub: the model has no snapshot of its own; pass a folder, or random:0")
        return SafetensorsWeights(model_folder)
    folder = expanded(text)
    if not folder.is_dir():
        raise ModelSourceError(f"--weights {text}: no such folder; pass random:SEED, hub, or a folder of safetensors")
    return SafetensorsWeights(folder)
