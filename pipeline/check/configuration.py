"""What a configuration says before any model is built from it, and the line of config.json that says it."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from nxpipe.emulator.configuration import fetched, oversized, quantised
from nxpipe.pipeline.check.finding import (
    CONFIGURATION,
    CUSTOM_CODE,
    NOT_CAPTURED,
    POSITIONS,
    QUANTISED,
    SOURCE,
    Finding,
)
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.request import Shape, longest_sequence
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import expanded

# Names that the families of transformers give to sizes which no model can have at zero.
_SIZES = (
    *("vocab_size", "hidden_size", "d_model", "n_embd", "intermediate_size", "d_ff", "num_key_value_heads"),
    *("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "num_attention_heads"),
    *("n_head", "max_position_embeddings", "n_positions", "head_dim", "image_size", "patch_size", "num_channels"),
)
_MOST_OVERSIZED = 20


def unusable_source(model_id: str, error: ModelSourceError) -> Finding:
    """A model that cannot be had: in its config.json where there is one, at the line that is no JSON."""
    path = expanded(model_id) / "config.json"
    line = getattr(error.__cause__, "lineno", None)
    named = str(path) in str(error)
    return Finding(SOURCE, str(error), file=shown(path) if named else "", line=line)


def review(source: ModelSource) -> Iterator[Finding]:
    """Everything in the configuration that can be judged alone."""
    for key in _SIZES:
        value = source.config.get(key)
        if isinstance(value, bool | str | float) or (isinstance(value, int) and value < 1):
            yield in_config(
                source,
                Finding(CONFIGURATION, f"{key} is {value!r}", "it must be a whole number of at least 1"),
                key,
            )
    for beyond in islice(oversized(source.config), _MOST_OVERSIZED):
        yield in_config(source, Finding(CONFIGURATION, str(beyond), "correct the configuration"), beyond.key)
    for key, name in fetched(source.config):
        what = f"{key} names another model, {name[:80]!r}, which is never fetched"
        yield in_config(source, Finding(CONFIGURATION, what, "write its own configuration as backbone_config"), key)
    if quantised(source.config):
        yield in_config(
            source,
            Finding(
                QUANTISED,
                "the configuration is that of a quantised checkpoint, whose packed weights have a layout of their own",
                "pass the model that it was quantised from",
            ),
            "quantization_config",
        )
    if source.config.get("auto_map"):
        yield in_config(
            source,
            Finding(
                CUSTOM_CODE,
                "the model brings Python code of its own (auto_map), which nxpipe never runs",
                "transformers' own class of this model_type is checked instead, if there is one",
            ),
            "auto_map",
        )


def too_long(source: ModelSource, shapes: tuple[Shape, ...]) -> Iterator[Finding]:
    """Buckets beyond the model's positions: a lookup there would read whatever lies behind the table."""
    longest = longest_sequence(source)
    for shape in shapes:
        if longest is not None and shape.sequence > longest:
            yield in_config(
                source,
                Finding(
                    POSITIONS,
                    f"{shape.name} needs {shape.sequence} positions, and the model knows {longest}",
                    f"pass --buckets of at most {longest}",
                    programs=(shape.name,),
                ),
                "max_position_embeddings",
                "n_positions",
            )


def blamed(source: ModelSource, finding: Finding) -> Finding:
    """A refusal without a line of code belongs to the setting of config.json that its message speaks of."""
    if finding.file or finding.rule is not NOT_CAPTURED:
        return finding
    spelled = finding.message.replace(" ", "_")
    keys = [key for key in source.config if re.search(rf"(?<![A-Za-z]){re.escape(key)}(?![A-Za-z])", spelled)]
    known = {source.config.get("model_type"), *_architectures(source)}
    values = [word for word in re.findall(r"\w+", finding.message) if word not in known]
    return in_config(source, finding, *keys, *values)


def _architectures(source: ModelSource) -> list[str]:
    named = source.config.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def in_config(source: ModelSource, finding: Finding, *words: str) -> Finding:
    """The finding, placed where the model's config.json has the first of these words, when the model is a folder."""
    path = source.folder / "config.json" if source.folder else None
    if path is None or not path.is_file():
        return finding
    return replace(finding, file=shown(path), line=_line_of(path, words))


def _line_of(path: Path, words: Sequence[str]) -> int | None:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = (number for word in words for number, line in enumerate(lines, start=1) if f'"{word}"' in line)
    return next(found, None)


def shown(path: Path) -> str:
    """Relative to where the command runs, as an annotation in a pull request needs it."""
    return Path(os.path.relpath(path)).as_posix()
