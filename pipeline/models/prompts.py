"""Prompts as token ids in batches of static shape. A prompt is truncated on request only, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxpipe.pipeline.util.errors import InputInvalid, ModelSourceError, PromptTooLong
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, NotJson, json_of, read_file

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.pipeline.models.source import ModelSource

_LARGEST = 16 * MiB


def read_prompts(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not empty."""
    try:
        lines = tuple(line for line in read_file(path, limit=_LARGEST).decode().splitlines() if line.strip())
    except UnicodeDecodeError as error:
        raise ModelSourceError(f"{path}: not UTF-8 ({error.reason}); save the prompts as plain text") from error
    except DocumentInvalid as error:
        raise InputInvalid(f"{path}: {error}; pass fewer prompts") from error
    except OSError as error:
        raise InputInvalid(f"{path}: {error.strerror}; pass a file of prompts, one a line") from error
    if not lines:
        raise InputInvalid(f"{path}: holds no prompt; write one a line, as text or as a JSON list of token ids")
    return lines


@dataclass(frozen=True)
class Prompts:
    """Rows of token ids, each at most as long as the largest bucket."""

    rows: tuple[tuple[int, ...], ...]
    padding: int
    truncate: bool

    @staticmethod
    def read(
        prompts: Sequence[str], source: "ModelSource", longest: int, *, truncate: bool = False, title: str = "Prompt"
    ) -> "Prompts":
        """Tokenise prompts; InputInvalid for one of more than `longest` tokens, the largest bucket, unless `truncate`
        cuts it."""
        rows = tuple(tuple(ids) for ids in _ids(prompts, source))
        number, row = max(enumerate(rows, start=1), key=lambda row: len(row[1]))
        if len(row) > longest and not truncate:
            raise PromptTooLong(
                f"{title} {number} has {len(row):,} tokens, and the largest bucket {longest:,}: pass a longer one to "
                "--buckets, or --truncate to cut it",
                len(row),
                longest,
            )
        padding, vocabulary = source.config.get("pad_token_id"), _vocabulary(source)
        if not isinstance(padding, int) or padding < 0 or (vocabulary is not None and padding >= vocabulary):
            padding = 0
        return Prompts(rows, padding, truncate)

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))

    def rows_for(self, sequence: int) -> list[tuple[int, ...]]:
        """The rows that a program of this sequence length reads: all, truncated, or those that fit."""
        return [row[:sequence] for row in self.rows if self.truncate or len(row) <= sequence]

    def batches(self, batch: int, sequence: int) -> list[dict[str, "np.ndarray[Any, Any]"]]:
        """Batches of rows, padded on the right; the last row fills up the last batch."""
        import numpy as np

        rows = self.rows_for(sequence)
        if not rows:
            return []
        rows += [rows[-1]] * (-len(rows) % batch)
        ids = np.full((len(rows), sequence), self.padding, np.int64)
        mask = np.zeros((len(rows), sequence), np.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        return [
            {"input_ids": ids[first : first + batch], "attention_mask": mask[first : first + batch]}
            for first in range(0, len(rows), batch)
        ]

    def description(self, noun: str, sequence: int) -> str:
        """The number of `noun` that a program of this sequence length reads, and of those that it omits."""
        read, beyond = self.rows_for(sequence), sum(max(0, len(row) - sequence) for row in self.rows)
        if self.truncate:
            return f"{len(read)} {noun}" + (f", cut to {sequence} tokens: {beyond:,} left out" if beyond else "")
        omitted = len(self.rows) - len(read)
        return f"{len(read)} {noun}" + (f"; {omitted} more are longer than {sequence} tokens" if omitted else "")


def _ids(prompts: Sequence[str], source: "ModelSource") -> list[list[int]]:
    """Token ids of JSON lists, and of texts by the model's tokenizer."""
    parsed = [as_ids(line) for line in prompts]
    texts = [line for line, ids in zip(prompts, parsed, strict=True) if ids is None]
    tokenised = iter(_tokenised(texts, source) if texts else ())
    rows = [ids if ids is not None else next(tokenised) for ids in parsed]
    vocabulary = _vocabulary(source)
    for line, ids in zip(prompts, rows, strict=True):
        outside = [token for token in ids if token < 0 or (vocabulary is not None and token >= vocabulary)]
        if outside or not ids:
            reason = f"token {outside[0]} is not in the vocabulary of {vocabulary}" if outside else "no token at all"
            raise InputInvalid(f"--prompts: {line[:40]!r}: {reason}; use the model's own tokenizer")
    return rows


def _vocabulary(source: "ModelSource") -> int | None:
    """The size of the vocabulary, of the model or of its text part."""
    text = source.config.get("text_config")
    for config in (source.config, text if isinstance(text, dict) else {}):
        size = config.get("vocab_size")
        if isinstance(size, int):
            return size
    return None


def as_ids(line: str) -> list[int] | None:
    """Token ids of a JSON list; None for text. A list with other numbers raises InputInvalid."""
    try:
        value = json_of(line)
    except NotJson:
        return None
    except DocumentInvalid as error:
        raise InputInvalid(f"--prompts: {line[:40]!r}: {error}; write a JSON list of token ids") from error
    if not isinstance(value, list) or any(isinstance(token, str | dict) or token is None for token in value):
        return None
    if not all(type(token) is int for token in value):
        raise InputInvalid(f"--prompts: {line[:40]!r}: token ids are whole numbers; write a JSON list of those")
    return value


def _tokenised(texts: list[str], source: "ModelSource") -> list[list[int]]:
    from nxpipe.emulator.capture import token_ids
    from nxpipe.emulator.errors import CaptureError

    if source.folder is None:
        raise ModelSourceError(
            f"--prompts: {source.id} does not include a tokenizer; pass the model's folder with --model-id, or token "
            "ids as a JSON list"
        )
    try:
        return token_ids(source.folder, texts)
    except CaptureError as error:
        raise ModelSourceError(f"--prompts: {error}; pass token ids as JSON lists, one a line") from error
