"""A checkpoint judged by the headers of its files: whole, and of this model. No tensor is read."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.check.finding import PICKLED, WEIGHTS, Finding
from nxpipe.pipeline.models.checkpoint import SafetensorsWeights, weight_files
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import json_of

if TYPE_CHECKING:
    from nxpipe.emulator.ir.types import TensorType

_LARGEST_HEADER = 100 << 20  # the format's own limit


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a folder, by their headers."""

    folder: Path
    identity: tuple[tuple[str, str], ...]  # file name and SHA-256 of its header: what a cached verdict hangs on


def examine_files(folder: Path | None) -> tuple[Checkpoint | None, list[Finding]]:
    """The checkpoint of a folder if it is whole. A folder with a configuration alone is no fault."""
    if folder is None:
        return None, []
    if not any(folder.glob("*.safetensors*")):
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        return None, [_pickled(pickles[0])] if pickles else []
    try:
        files = weight_files(folder)
    except ModelSourceError as error:
        return None, [Finding(WEIGHTS, str(error), "fetch the whole snapshot again")]
    digests, findings = [], []
    for path in files:
        try:
            digests.append((path.name, hashlib.sha256(_header(path)).hexdigest()))
        except OSError as error:
            reason = f"{path.name}: cannot be read ({error.strerror or error})"
            findings.append(Finding(WEIGHTS, reason, "mend its permissions, or fetch it again", file=path.name))
        except ModelSourceError as error:
            findings.append(Finding(WEIGHTS, str(error), "fetch or save the file again", file=path.name))
    return (None if findings else Checkpoint(folder, tuple(digests))), findings


def compare(checkpoint: Checkpoint, wanted: Mapping[str, "TensorType"]) -> Iterator[Finding]:
    """The tensors that the model asks for and the checkpoint does not have so: one finding, the first as example."""
    weights = SafetensorsWeights(checkpoint.folder)
    failures = []
    for name, kind in wanted.items():
        try:
            weights.require(name, kind)
        except ModelSourceError as error:
            failures.append((name, str(error)))
    if failures:
        name, message = failures[0]
        advice = f"{len(failures)} of {len(wanted)} tensors do not agree; pass this model's own weights, or its task"
        yield Finding(WEIGHTS, message, advice, module=name, count=len(failures))


def _pickled(name: str) -> Finding:
    return Finding(
        PICKLED,
        f"the weights are pickled ({name}), which nxpipe never reads",
        "save them with save_pretrained(..., safe_serialization=True)",
    )


def _header(path: Path) -> bytes:
    """The header of a safetensors file, once it is certain that every tensor it promises is there."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ModelSourceError(f"{path.name}: {size:,} bytes, too short for the header that it announces")
        header = file.read(length)
    try:
        tensors = json_of(header)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelSourceError(f"{path.name}: its header is not that of a safetensors file") from error
    if end != size:
        raise ModelSourceError(f"{path.name}: {size:,} bytes, where its header promises {end:,}")
    return header
