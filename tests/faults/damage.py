"""Random damage to stored bytes: bit rot, torn writes and mix-ups."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

Damage = Callable[[bytes, Random], bytes]


def flip(data: bytes, chance: Random) -> bytes:
    """Flip one bit."""
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def truncate(data: bytes, chance: Random) -> bytes:
    return data[: chance.randrange(len(data))]


def append(data: bytes, chance: Random) -> bytes:
    return data + chance.randbytes(chance.randint(1, 64))


def blank(data: bytes, chance: Random) -> bytes:
    """Overwrite a range with different bytes, like a lost sector."""
    at = chance.randrange(len(data))
    end = min(len(data), at + chance.randint(1, 512))
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at:end]) + data[end:]


DAMAGES: Final[Sequence[Damage]] = (flip, flip, flip, truncate, append, blank)
