"""How the vector engine finds the largest of a row, eight at a time. Numbers are compared in float32."""

import numpy as np

from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import encode, raw
from nxpipe.emulator.core.vector import bits
from nxpipe.emulator.isa.vector import FindIndex8, MatchReplace8, Max8
from nxpipe.emulator.numerics import Array


def max8(_: Max8, at: Bound) -> None:
    at.put(np.sort(at.floats("src"), axis=1)[:, :-9:-1])


def find_index8(_: FindIndex8, at: Bound) -> None:
    dst = at.window("dst")
    places = _first_matches(at)[0]
    dst.put_bits(places.astype(raw(dst.dtype)))  # -1 has all bits set


def match_replace8(instruction: MatchReplace8, at: Bound) -> None:
    dst = at.window("dst")
    matched = _first_matches(at)[1]
    same = dst.dtype is instruction.src.dtype
    source = bits(at, "src") if same else encode(at.floats("src"), dst.dtype)
    number = encode(np.full(1, instruction.number, np.float32), dst.dtype)
    dst.put_bits(np.where(matched, number, source))


def _first_matches(at: Bound) -> tuple[Array, Array]:
    """For each value the place of its first match that no equal value before it has, or -1; and all these places."""
    x, values = at.floats("src"), at.floats("values")
    matched = np.zeros(x.shape, np.bool_)
    lanes = np.arange(len(x))
    places = np.full(values.shape, -1, np.int64)
    for number in range(values.shape[1]):
        matches = (x == values[:, number : number + 1]) & ~matched
        first = matches.argmax(axis=1)
        found = matches[lanes, first]
        places[found, number] = first[found]
        matched[lanes[found], first[found]] = True
    return places, matched
