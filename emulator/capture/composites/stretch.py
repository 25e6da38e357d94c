"""Tables of shares for axes that are stretched or shrunk: [old places, new places]."""

import math

import numpy as np

from nxpipe.emulator.capture.room import require_room
from nxpipe.emulator.numerics import Array


def smoothing(old: int, places: Array, stretch: float, *, cubic: float | None, beyond: bool) -> Array:
    """With antialiasing a new place mixes more neighbours the more the axis shrinks.

    `places` are those of the new elements on the old axis, `stretch` how far apart they are, and `cubic` the constant
    of Keys' kernel, where it is not a triangle. Neighbours beyond the border count as the border, or not at all.
    """
    wide = max(stretch, 1.0)
    margin = math.ceil(2 * wide) + 1 if beyond else 0
    require_room((old + 2 * margin, len(places)))
    near = np.arange(-margin, old + margin)
    distance = np.abs((near[:, None] - places[None, :]) / wide)
    shares = _triangle(distance) if cubic is None else _keys(distance, cubic)
    folded = np.zeros((old, len(places)))
    np.add.at(folded, np.clip(near, 0, old - 1), shares / shares.sum(axis=0))
    return np.asarray(folded, np.float32)


def _triangle(d: Array) -> Array:
    return np.asarray(np.maximum(1 - d, 0))


def _keys(d: Array, a: float) -> Array:
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return np.asarray(np.where(d <= 1, inner, np.where(d < 2, outer, 0)))
