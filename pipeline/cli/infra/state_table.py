"""The table of the checks or steps of a report, whose first column is the state."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from nxpipe.pipeline.util.text import style, table, wrapped_table

_COLOURS: Final = {"ok": "green", "fails": "red", "unknown": "yellow"}


def state_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """On a terminal wide texts are wrapped; elsewhere a row is one line."""
    coloured = [(style(state, fg=_COLOURS[state]), *cells) for state, *cells in rows]
    if sys.stdout.isatty():
        return wrapped_table(header, coloured, shutil.get_terminal_size().columns)
    return table(header, coloured)
