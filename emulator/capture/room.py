"""How large a table an importer makes for one operator. It is asked before the table is made, from sizes alone."""

import math
from collections.abc import Sequence
from typing import Final

from nxpipe.emulator.capture.site import NotExpressible

# The mask of 8,192 tokens takes 64 MiB. What makes a table holds several like it for a moment.
MOST_TABLE_BYTES: Final = 256 * 2**20


def require_room(sizes: Sequence[int], itemsize: int = 8) -> None:
    """A table of these sizes is about to be made. A size of nothing excuses no other: parts of it are made first."""
    need = math.prod(max(size, 1) for size in sizes) * itemsize
    if need > MOST_TABLE_BYTES:
        raise NotExpressible(
            f"it needs a table of {need:,} bytes, and the limit is {MOST_TABLE_BYTES:,}; use smaller sizes"
        )
