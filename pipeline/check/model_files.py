"""Checks of a model's files: its configuration, with lines of config.json, and its checkpoint.

Only the headers of a checkpoint are read; they have the names, types and shapes of all tensors.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.emulator.configuration import oversized, quantised, remote_references
from nxpipe.emulator.regular_file import open_regular
from nxpipe.pipeline.compile.findings import (
    CONFIGURATION,
    CUSTOM_CODE,
    NOT_CAPTURED,
    PICKLED,
    POSITIONS,
    QUANTISED,
    SOURCE,
    WEIGHTS,
    Finding,
)
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import PretrainedModel, longest_sequence
from nxpipe.pipeline.models.weights import SafetensorsWeights, weight_files
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import expanded, json_of

if TYPE_CHECKING:
    from nxpipe.emulator.ir.types import TensorType


# Settings of transformers' model families that must be at least 1.
_SIZES = (
    *("vocab_size", "hidden_size", "d_model", "n_embd", "intermediate_size", "d_ff", "num_key_value_heads"),
    *("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_attention_heads"),
    *("n_head", "max_position_embeddings", "n_positions", "head_dim", "image_size", "patch_size", "num_channels"),
)
_MOST_OVERSIZED = 20


def unusable_source(model_id: str, error: ModelSourceError) -> Finding:
    """The finding for an unreadable model, with the line of a syntax error in config.json."""
    path = expanded(model_id) / "config.json"
    line = getattr(error.__cause__, "lineno", None)
    is_named = str(path) in str(error)
    return Finding(SOURCE, str(error), file=relative_path(path) if is_named else "", line=line)


def review_config(source: PretrainedModel) -> Iterator[Finding]:
    """The findings of the configuration."""
    for key in _SIZES:
        value = source.config.get(key)
        if isinstance(value, bool | str | float) or (isinstance(value, int) and value < 1):
            yield located_in_config(
                source,
                Finding(CONFIGURATION, f"{key} is {value!r}", "it must be a whole number of at least 1"),
                key,
            )
    for excess in islice(oversized(source.config), _MOST_OVERSIZED):
        yield located_in_config(source, Finding(CONFIGURATION, str(excess), "correct the configuration"), excess.key)
    for key, name in remote_references(source.config):
        message = f"{key} names another model, {name[:80]!r}, which is never fetched"
        yield located_in_config(
            source, Finding(CONFIGURATION, message, "write the configuration of the backbone as backbone_config"), key
        )
    if quantised(source.config):
        yield located_in_config(
            source,
            Finding(
                QUANTISED,
                "the configuration is that of a quantised checkpoint, whose packed weights are not supported",
                "pass the model before quantisation",
            ),
            "quantization_config",
        )
    if source.config.get("auto_map"):
        yield located_in_config(
            source,
            Finding(
                CUSTOM_CODE,
                "the model contains Python code (auto_map), which nxpipe never runs",
                "the class of this model_type in transformers is checked instead, if it exists",
            ),
            "auto_map",
        )


def too_long(source: PretrainedModel, shapes: tuple[Shape, ...]) -> Iterator[Finding]:
    """Buckets beyond the model's positions, where a lookup would read past the end of the table."""
    longest = longest_sequence(source)
    for shape in shapes:
        if longest is not None and shape.sequence > longest:
            yield located_in_config(
                source,
                Finding(
                    POSITIONS,
                    f"{shape.name} needs {shape.sequence} positions, and the model has {longest}",
                    f"pass --buckets of at most {longest}",
                    programs=(shape.name,),
                ),
                "max_position_embeddings",
                "n_positions",
            )


def located_by_message(source: PretrainedModel, finding: Finding) -> Finding:
    """Locate a finding without a source line at the setting of config.json that its message names."""
    if finding.file or finding.rule is not NOT_CAPTURED:
        return finding
    spelled = finding.message.replace(" ", "_")
    keys = [key for key in source.config if re.search(rf"(?<![A-Za-z]){re.escape(key)}(?![A-Za-z])", spelled)]
    known = {source.config.get("model_type"), *_architectures(source)}
    values = [word for word in re.findall(r"\w+", finding.message) if word not in known]
    return located_in_config(source, finding, *keys, *values)


def _architectures(source: PretrainedModel) -> list[str]:
    architectures = source.config.get("architectures")
    return [str(name) for name in architectures] if isinstance(architectures, list) else []


def located_in_config(source: PretrainedModel, finding: Finding, *keys: str) -> Finding:
    """Locate a finding at the line of config.json with the first of these keys, if the model is a folder."""
    path = source.folder / "config.json" if source.folder else None
    if path is None or not path.is_file():
        return finding
    return replace(finding, file=relative_path(path), line=_line_of(path, keys))


def _line_of(path: Path, keys: Sequence[str]) -> int | None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    numbers = (number for key in keys for number, line in enumerate(lines, start=1) if f'"{key}"' in line)
    return next(numbers, None)


def relative_path(path: Path) -> str:
    """The path relative to the working directory, as annotations of a pull request require."""
    return Path(os.path.relpath(path)).as_posix()


_LARGEST_HEADER = 100 << 20  # the limit of the safetensors format


@dataclass(frozen=True)
class Checkpoint:
    """The weight files of a folder, by their headers."""

    folder: Path
    identity: tuple[tuple[str, str], ...]  # file name and SHA-256 of its header: a part of the cache key


def examine_files(folder: Path | None) -> tuple[Checkpoint | None, list[Finding]]:
    """The checkpoint of a folder if it is complete, and findings. A folder with only a configuration has no finding."""
    if folder is None:
        return None, []
    if not any(folder.glob("*.safetensors*")):
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        return None, [_pickled(pickles[0])] if pickles else []
    try:
        files = weight_files(folder)
    except ModelSourceError as error:
        return None, [Finding(WEIGHTS, str(error), "fetch the complete snapshot again")]
    digests, findings = [], []
    for path in files:
        try:
            digests.append((path.name, hashlib.sha256(_header(path)).hexdigest()))
        except OSError as error:
            reason = f"{path.name}: cannot be read ({error.strerror or error})"
            findings.append(
                Finding(WEIGHTS, reason, "correct the file permissions, or fetch the file again", file=path.name)
            )
        except ModelSourceError as error:
            findings.append(Finding(WEIGHTS, str(error), "fetch or save the file again", file=path.name))
    return (None if findings else Checkpoint(folder, tuple(digests))), findings


def compare_checkpoint(checkpoint: Checkpoint, required: Mapping[str, "TensorType"]) -> Iterator[Finding]:
    """One finding for all tensors that the checkpoint lacks or has in another shape; it names the first."""
    weights = SafetensorsWeights(checkpoint.folder)
    failures = []
    for name, kind in required.items():
        try:
            weights.require(name, kind)
        except ModelSourceError as error:
            failures.append((name, str(error)))
    if failures:
        name, message = failures[0]
        advice = f"{len(failures)} of {len(required)} tensors do not match; pass the weights of this model, or its task"
        yield Finding(WEIGHTS, message, advice, module=name, count=len(failures))


def _pickled(name: str) -> Finding:
    return Finding(
        PICKLED,
        f"the weights are pickled ({name}), which nxpipe never reads",
        "save them with save_pretrained(..., safe_serialization=True)",
    )


def _header(path: Path) -> bytes:
    """The header of a safetensors file; ModelSourceError unless the file has all the bytes that it declares."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise ModelSourceError(f"{path.name}: {size:,} bytes, too short for the header that it declares")
        header = file.read(length)
    try:
        tensors = json_of(header)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelSourceError(f"{path.name}: its header is not that of a safetensors file") from error
    if end != size:
        raise ModelSourceError(f"{path.name}: {size:,} bytes, but its header declares {end:,}")
    return header
