"""Text as a program reads it: a file of prompts, one a line, as token ids in batches of fixed shape."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ModelSourceError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.models.source import ModelSource


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not empty."""
    try:
        lines = tuple(line for line in path.read_text("utf-8").splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise ModelSourceError(f"{path}: not UTF-8 ({error.reason}); save the prompts as plain text") from error
    if not lines:
        raise ModelSourceError(f"{path}: holds no prompt; write one a line, as text or as a JSON list of token ids")
    return lines


def batches_of(
    prompts: Sequence[str], source: "ModelSource", batch: int, sequence: int
) -> list[dict[str, "np.ndarray[Any, Any]"]]:
    """Prompts cut to `sequence` tokens and padded on the right; the last batch is filled up with its last prompt."""
    import numpy as np

    rows = [ids[:sequence] for ids in _ids(prompts, source)]
    rows += [rows[-1]] * (-len(rows) % batch)
    padding = source.config.get("pad_token_id")
    ids = np.full((len(rows), sequence), padding if isinstance(padding, int) else 0, np.int64)
    mask = np.zeros((len(rows), sequence), np.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return [
        {"input_ids": ids[first : first + batch], "attention_mask": mask[first : first + batch]}
        for first in range(0, len(rows), batch)
    ]


def _ids(prompts: Sequence[str], source: "ModelSource") -> list[list[int]]:
    """A line that is a JSON list is ids already; the others go through the model's own tokenizer."""
    parsed = [_as_ids(line) for line in prompts]
    texts = [line for line, ids in zip(prompts, parsed, strict=True) if ids is None]
    tokenised = iter(_tokenised(texts, source) if texts else ())
    rows = [ids if ids is not None else next(tokenised) for ids in parsed]
    vocabulary = source.config.get("vocab_size")
    for line, ids in zip(prompts, rows, strict=True):
        outside = [token for token in ids if token < 0 or (isinstance(vocabulary, int) and token >= vocabulary)]
        if outside or not ids:
            what = f"token {outside[0]} is not in the vocabulary of {vocabulary}" if outside else "no token at all"
            raise ModelSourceError(f"--prompts: {line[:40]!r}: {what}; use the model's own tokenizer")
    return rows


def _as_ids(line: str) -> list[int] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(type(token) is int for token in value) else None


def _tokenised(texts: list[str], source: "ModelSource") -> list[list[int]]:
    from emulator.capture import token_ids
    from emulator.errors import CaptureError

    if source.folder is None:
        raise ModelSourceError(
            f"--prompts: {source.id} comes without a tokenizer; pass the model's folder, or token ids as JSON lists"
        )
    try:
        return token_ids(source.folder, texts)
    except CaptureError as error:
        raise ModelSourceError(f"--prompts: {error}; pass token ids as JSON lists, one a line") from error
