"""Files of a folder that a serving runtime compiled: which there are, and whether each is complete.

Raises ModelSourceError with one sentence: file, reason, remedy.
"""

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from nxpipe.artifact_store.fetch.file_layout import DTYPES
from nxpipe.artifact_store.manifest import WIDTHS
from nxpipe.pipeline.util.errors import ModelSourceError, cause_of
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, json_of, read_file

Content = Path | bytes  # a file of this machine, or bytes in place of one

TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_LARGEST_JSON: Final = 64 * MiB


def files_below(root: Path, leave_out: Callable[[str], bool] = lambda _: False) -> dict[str, Path]:
    """Every file below a folder by its path, names with dots included. Links and special files are refused: what a
    link leads to may lie outside of the folder."""
    if not root.is_dir():
        raise ModelSourceError(f"{root}: no such folder; pass the folder that the runtime wrote")
    found: dict[str, Path] = {}

    def fail(error: OSError) -> None:
        raise ModelSourceError(f"{error.filename}: cannot be listed ({error.strerror}); correct its mode") from error

    for below, folders, names in os.walk(root, onerror=fail):
        for name in (*folders, *names):
            path = Path(below, name)
            relative = path.relative_to(root).as_posix()
            if leave_out(relative) or (path.is_dir() and not path.is_symlink()):
                continue
            if path.is_symlink():
                raise ModelSourceError(f"{path}: is a link; replace links by their files, as `cp -rL` does")
            if not path.is_file():
                raise ModelSourceError(f"{path}: is no regular file; remove it from the folder")
            found[relative] = path
    return dict(sorted(found.items()))


def require_file(files: Mapping[str, Content], path: str, root: Path, remedy: str) -> Content:
    if path not in files:
        raise ModelSourceError(f"{root / path}: is missing; {remedy}")
    return files[path]


def json_file(path: Path) -> dict[str, Any]:
    try:
        document = json_of(read_file(path, limit=_LARGEST_JSON))
    except (OSError, DocumentInvalid) as fault:
        raise ModelSourceError(f"{path}: cannot be read ({cause_of(fault)}); export the folder again") from fault
    if not isinstance(document, dict):
        raise ModelSourceError(f"{path}: is no JSON object; export the folder again")
    return document


def require_torchscript(path: Path) -> None:
    """The archive of torch.jit.save is complete: its directory stands at the end."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as fault:
        raise ModelSourceError(
            f"{path}: is no complete TorchScript archive ({fault}); copy it again, or save it with torch.jit.save"
        ) from fault
    if not any(name.endswith("/constants.pkl") for name in names):
        raise ModelSourceError(f"{path}: is an archive without constants.pkl; save the module with torch.jit.save")


@dataclass(frozen=True)
class SafetensorsEntry:
    """A tensor of a safetensors file; `start` and `end` count from the end of the header. `dtype` is None for a type
    that the store does not know."""

    name: str
    dtype: str | None
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether its bytes are those of its type and shape."""
        return self.dtype is not None and self.end - self.start == WIDTHS[self.dtype] * math.prod(self.shape)


def safetensors_header(path: Path) -> tuple[int, tuple[SafetensorsEntry, ...]]:
    """The size of the header with its length field, and the tensors in the order of the file, whose size it checks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if 8 + length <= size and length <= _LARGEST_JSON else b""
    try:
        entries = [
            SafetensorsEntry(
                name, DTYPES.get(one["dtype"]), tuple(map(int, one["shape"])), *map(int, one["data_offsets"])
            )
            for name, one in json.loads(head).items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelSourceError(f"{path}: its safetensors header cannot be read; copy the file again") from None
    wanted = 8 + length + max((entry.end for entry in entries), default=0)
    if size != wanted:
        raise ModelSourceError(f"{path}: has {size} bytes, and its header names {wanted}; copy the file again")
    return 8 + length, tuple(sorted(entries, key=lambda entry: (entry.start, entry.end)))


def require_weights(files: Mapping[str, Content], root: Path) -> None:
    """Whole Hugging Face weights: one file, or all files of the index."""
    index = files.get("model.safetensors.index.json")
    names = json_file(index).get("weight_map") if isinstance(index, Path) else None
    for name in sorted({str(name) for name in names.values()}) if isinstance(names, dict) else ():
        require_file(files, name, root, "the index names it: download the checkpoint again")
    if not any(name.endswith(".safetensors") and "/" not in name for name in files):
        raise ModelSourceError(
            f"{root}: holds no *.safetensors, which the server shards when it loads; add the weights"
        )


def checked_files(files: dict[str, Path]) -> dict[str, Path]:
    for name, path in files.items():
        if name.endswith(".safetensors"):
            safetensors_header(path)
    return files


# Checkpoints of other frameworks, and what downloads leave behind.
_UNREAD: Final = (".*", "original", "*.bin", "*.pth", "*.gguf", "*.onnx", "*.msgpack", "*.h5")


def _is_unread(path: str) -> bool:
    return any(fnmatchcase(part, pattern) for part in path.split("/") for pattern in _UNREAD)


def model_files(root: Path) -> dict[str, Path]:
    """The files that a server reads of the model's folder: settings, tokenizer, weights."""
    files = checked_files(files_below(root, leave_out=_is_unread))
    require_file(files, "config.json", root, "vLLM reads it: pass the model's folder with --model-files")
    if not any(name in files for name in TOKENIZERS):
        raise ModelSourceError(f"{root}: holds no tokenizer, such as tokenizer.json; copy the model's tokenizer files")
    return files
