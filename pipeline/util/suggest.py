"""The nearest valid spelling of a word somebody typed."""

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely meant, or None when none is close."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause to append to an error message; empty when nothing is close."""
    guess = nearest(word, known)
    return f"; did you mean {guess!r}?" if guess else ""
