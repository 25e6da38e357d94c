"""Weights of a model: their sources, and checkpoint files with SHA-256 digests that are cached between runs.

A cached digest is valid for the device, inode, size and both times of the file. A digest is not cached if its file
changed in the last seconds, because a later write could leave the same times.
"""

import hashlib
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, cache_folder, expanded, json_of, read_file

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.ir.types import TensorType


_SETTLED_SECONDS = 2.0


def sha256_of_file(path: Path) -> str:
    """The digest of the file's current content."""
    stamp = _stamp(path)
    with suppress(OSError, ValueError, KeyError, TypeError):  # no cached digest, or a damaged one
        cached = json_of(read_file(_cached_digest_path(path), limit=MiB))
        if cached["stamp"] == stamp:
            return str(cached["sha256"])
    with open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if stamp == _stamp(path) and time.time() - path.stat().st_mtime > _SETTLED_SECONDS:
        _cache_digest(path, {"stamp": stamp, "sha256": digest})
    return digest


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _cached_digest_path(path: Path) -> Path:
    return cache_folder() / "digests" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def _cache_digest(path: Path, value: dict[str, object]) -> None:
    """Store a digest, best effort: a cache that cannot be written only costs time."""
    with suppress(OSError):
        cache_file = _cached_digest_path(path)
        cache_file.parent.parent.mkdir(0o700, parents=True, exist_ok=True)
        cache_file.parent.mkdir(0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=cache_file.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        Path(temporary).replace(cache_file)


_LARGEST_INDEX = 128 * MiB  # the index of a model of 91,991 tensors has 9 MB


class SafetensorsWeights:
    """A safetensors checkpoint. A file is opened when one of its tensors is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = weight_files(folder)

    def identity(self) -> dict[str, object]:
        return {"kind": "safetensors", "files": {path.name: sha256_of_file(path) for path in self._files}}

    def load(self, name: str, kind: "TensorType") -> "np.ndarray[Any, Any]":

        stored = self._stored_name(name)
        with _opened(self._file_of[stored]) as file:
            tensor: np.ndarray[Any, Any] = file.get_tensor(stored)
        self._require_shape(stored, tensor.shape, kind)
        return tensor.astype(numpy_dtype(str(kind.dtype)), copy=False)

    def require(self, name: str, kind: "TensorType") -> None:
        """Raise the errors of `load` for this tensor, without reading it."""
        stored = self._stored_name(name)
        with _opened(self._file_of[stored]) as file:
            self._require_shape(stored, file.get_slice(stored).get_shape(), kind)

    def _require_shape(self, stored: str, shape: Sequence[int], kind: "TensorType") -> None:
        if tuple(shape) != tuple(kind.shape):
            raise ModelSourceError(
                f"{self._file_of[stored]}: tensor {stored!r} has shape {list(shape)}, but the model's "
                f"configuration needs {list(kind.shape)}; the weights belong to another configuration"
            )

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        """The file of every tensor of the checkpoint."""
        file_of: dict[str, Path] = {}
        for path in self._files:
            with _opened(path) as file:
                file_of.update(dict.fromkeys(file.keys(), path))
        return file_of

    @cached_property
    def _spellings(self) -> dict[str, list[str]]:
        """Stored names by their modern spelling, with and without the prefix of a base model."""
        spelled: dict[str, list[str]] = defaultdict(list)
        for stored in self._file_of:
            modern = _modern(stored)
            spelled[modern].append(stored)
            spelled[modern.partition(".")[2]].append(stored)
        return spelled

    def _stored_name(self, name: str) -> str:
        """The stored name of a parameter. Checkpoints of head models prefix the base model's names (`bert.encoder...`),
        and checkpoints of base models do not."""
        if name in self._file_of:
            return name
        tail = name.partition(".")[2]
        candidates = self._spellings.get(name) or [
            other for other in self._spellings.get(tail, ()) if _modern(other) == tail
        ]
        if len(candidates) == 1:
            return candidates[0]
        holds = (
            f"{len(candidates)} that could be it: {', '.join(sorted(candidates)[:4])}"
            if candidates
            else "no such tensor"
        )
        raise ModelSourceError(
            f"{self._folder}: the model needs tensor {name!r}, but the weights hold {holds} (of {len(self._file_of)} "
            "tensors); pass the folder of this model's own weights, the right --task, or --weights random:0"
        )


def _modern(name: str) -> str:
    """The modern spelling: checkpoints of 2018 call a norm's weight and bias gamma and beta."""
    return re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ModelSourceError(
            f"{path}: not a readable safetensors file of {path.stat().st_size:,} bytes ({error}); "
            "fetch or save it again"
        ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in order; ModelSourceError if there are none, or only pickles."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise ModelSourceError(
            f"{folder}: holds {pickles[0]} but no safetensors; nxpipe never reads pickled weights, "
            "save them with save_pretrained(..., safe_serialization=True)"
        )
    raise ModelSourceError(f"{folder}: holds no model.safetensors; add the weights, or pass --weights random:0")


def _indexed(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json_of(read_file(index, limit=_LARGEST_INDEX))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f": {error}" if isinstance(error, DocumentInvalid) else ""
        raise ModelSourceError(
            f"{index}: not a safetensors index (it must map tensor names to files){why}; fetch the whole snapshot"
        ) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelSourceError(f"{index}: names the file {name!r}, which is not a plain file name in that folder")
        if not (folder / name).is_file():
            raise ModelSourceError(f"{index}: names {name!r}, which is missing; fetch the whole snapshot")
    return [folder / name for name in names]


def numpy_dtype(name: str) -> "np.dtype[Any]":
    """The numpy type of a dtype name; narrow floats come from ml_dtypes."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


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
