"""Tokenisation: text to token ids by the tokenizer in a model's folder."""

from collections.abc import Sequence
from pathlib import Path

import transformers

from nxpipe.emulator.capture.model import quiet_libraries
from nxpipe.emulator.errors import CaptureError

# Without any of these files transformers creates an empty vocabulary, in which every word is unknown.
_VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json"),
    *("spiece.model", "sentencepiece.bpe.model", "tekken.json"),
)


def token_ids_in_process(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, with special tokens. Makes no network requests."""
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise CaptureError(f"{folder.name} has no tokenizer")
    try:
        with quiet_libraries():
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            return [list(tokenizer(text)["input_ids"]) for text in texts]
    except Exception as fault:  # the libraries of tokenizer formats may raise any exception
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
        raise CaptureError(f"{folder.name} has a tokenizer that cannot be read: {reason}") from fault
