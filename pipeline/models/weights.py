"""Sources of weights: the model's own checkpoint, another folder, or a seed. Tensors are loaded one at a time."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from nxpipe.pipeline.models.checkpoint import SafetensorsWeights, numpy_dtype
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import expanded

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.ir.types import TensorType


Arrays: TypeAlias = Mapping[str, "np.ndarray[Any, Any]"]

_CHUNK = 1 << 16  # elements at a time, which fit the processor's cache
GENERATOR = 1  # part of the request key: increase it when `random_tensor` changes any bit


class Weights(Protocol):
    """A source of weights: its identity, and its tensors by name."""

    def identity(self) -> dict[str, object]:
        """Key inputs of the weights, cheap to compute and without paths."""
        ...

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]": ...


@dataclass(frozen=True)
class WeightsSource:
    """The value of `--weights`, or of `weights` in nxpipe.toml: "hub", "random:SEED" or a folder.

    Parsing never fails, since commands that read no weights accept any value; `open` raises the errors.
    """

    kind: Literal["checkpoint", "random", "folder"]
    text: str | None = None  # as the user wrote it; None: the model's own checkpoint, as "hub"

    @classmethod
    def parse(cls, text: str | None) -> "WeightsSource":
        if text is None or text == "hub":
            return cls("checkpoint", text)
        return cls("random" if text.startswith("random") else "folder", text)

    @property
    def folder(self) -> Path | None:
        """The folder that the user named; None for a seed and for the model's own checkpoint."""
        return expanded(str(self.text)) if self.kind == "folder" else None

    def within(self, root: Path) -> "WeightsSource":
        """The same source with a relative folder anchored at `root`."""
        return self if self.folder is None else replace(self, text=str(root / self.folder))

    def open(self, model_folder: Path | None) -> "Weights":
        """The weights; ModelSourceError if there are none. `model_folder` has the model's own checkpoint."""
        if self.kind == "random":
            seed = re.fullmatch(r"random:(\d{1,18})", str(self.text))
            if seed is None:
                raise ModelSourceError(f"--weights {self.text}: a seed must be a whole number, as in random:0")
            return RandomWeights(int(seed[1]))
        if self.folder is None:
            if model_folder is None:
                raise ModelSourceError(
                    "--weights hub: the model has no snapshot of its own; pass a folder, or random:0"
                )
            return SafetensorsWeights(model_folder)
        if not self.folder.is_dir():
            raise ModelSourceError(
                f"--weights {self.text}: no such folder; pass random:SEED, hub, or a folder of safetensors"
            )
        return SafetensorsWeights(self.folder)


class NoWeights:
    """The weights of a specification that is only compiled: for a check, and for a listing of passes."""

    def identity(self) -> dict[str, object]:
        raise ModelSourceError("no weights were opened; pass --weights random:0 or a folder")

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]":
        raise ModelSourceError(f"no weights were opened for tensor {name!r}; pass --weights random:0 or a folder")


class Tensors(Mapping[str, "np.ndarray[Any, Any]"]):
    """The tensors of a model, each loaded when it is read and not cached, since a 70B model would fill the memory."""

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
    """Weights from a seed: equal on every machine, each tensor independent of all others."""

    seed: int

    def identity(self) -> dict[str, object]:
        return {"kind": "random", "seed": self.seed, "generator": GENERATOR}

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]":
        return random_tensor(self.seed, name, kind.shape, str(kind.dtype))


def random_tensor(seed: int, name: str, shape: tuple[int, ...], dtype: str) -> "np.ndarray[Any, Any]":
    """A tensor with an approximately normal distribution around 0 (scales of norms: around 1) and the usual spread of
    an untrained transformer.

    It is computed from Philox's raw bits, whose stream numpy promises never to change, by integer sums alone: neither
    numpy's release nor the processor can change a bit. The sum of four 16-bit lanes has a standard deviation of 2**17 /
    sqrt(12).
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
