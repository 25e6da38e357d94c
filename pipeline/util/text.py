"""Text for people: spelling suggestions, tables, sizes."""

import difflib
from collections.abc import Iterable, Sequence

from nxpipe.pipeline.util.escape import shown, style, unstyled


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar known word, or None if none is similar."""
    by_folded = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The clause "; did you mean X?" of an error message; empty if no known word is similar."""
    guess = nearest(word, known)
    return f"; did you mean {guess!r}?" if guess else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, without trailing blanks; cells may have styles."""
    cells = [[style(title, bold=True) for title in header], *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(unstyled(row[column])) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(map(_padded, row, widths)).rstrip() for row in cells)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - len(unstyled(cell)))


def human_bytes(count: int) -> str:
    """A size in decimal units: 437.9 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
