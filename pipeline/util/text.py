"""The nearest valid spelling of a word somebody typed."""

import difflib
from collections.abc import Iterable, Sequence

from nxpipe.pipeline.util.escape import shown, style, unstyled


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` most likely meant, or None when none is close."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A clause to append to an error message; empty when nothing is close."""
    guess = nearest(word, known)
    return f"; did you mean {guess!r}?" if guess else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain columns, two spaces apart; a cell may be coloured, and nothing follows the last one."""
    cells = [[style(title, bold=True) for title in header], *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(unstyled(row[column])) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(map(_padded, row, widths)).rstrip() for row in cells)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - len(unstyled(cell)))


def human_bytes(count: int) -> str:
    """A size as people read it: 437.9 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
