"""Maliciously damaged executables, with correct digests so that the damage is read."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from nxpipe.emulator.errors import ExecutableInvalid
from nxpipe.emulator.executable.executable import BODY, Section, packed, unpacked

Damage = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


@lru_cache(64)
def parts(data: bytes) -> Mapping[Section, bytes]:
    return {section: reader.raw(reader.left) for section, reader in unpacked(data).items()}


def sealed(data: bytes) -> bytes:
    """The bytes behind the table, divided as the table says, with digests that are right. Where it says nothing that
    makes sense, as they are."""
    sections, at = {}, BODY
    for number, section in enumerate(Section):
        size = int.from_bytes(data[28 + 52 * number : 36 + 52 * number], "little")
        last = section is Section.CONSTANTS
        sections[section] = data[at:] if last else data[at : at + size]
        at += size
    return packed(sections) if at <= 2 * len(data) else data


def flipped(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut_short(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return data[: chance.randrange(len(data))]


def overwritten(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Overwrite bytes with extreme values: zeros, ones, the largest numbers."""
    at = chance.randrange(len(data))
    piece = chance.choice([b"\0", b"\x01", b"\x7f", b"\xff", b"\xff" * 9 + b"\x01", chance.randbytes(3)])
    return data[:at] + piece + data[at + len(piece) :]


def spliced(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = chance.choice(others)
    at, to = chance.randrange(len(data)), chance.randrange(len(other))
    return data[:at] + other[to : to + chance.randint(1, 60)] + data[at + chance.randint(0, 60) :]


def exchanged(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Replace a section by that of another executable."""
    section = chance.choice(list(Section))
    return packed({**parts(data), section: parts(chance.choice(others))[section]})


def within(damage: Damage) -> Damage:
    """Damage one section, and correct sizes and digests."""

    def damaged(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        sections = parts(data)
        section = chance.choice([section for section, content in sections.items() if content])
        content = damage(chance, sections[section], [parts(other)[section] or b"\0" for other in others])
        return packed({**sections, section: content})

    return damaged


def noise(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    return chance.choice([b"", data[:BODY]]) + chance.randbytes(chance.randrange(200))


DAMAGES: Sequence[Damage] = (
    *(flipped, cut_short, overwritten, spliced, exchanged, noise),
    *(within(damage) for damage in (flipped, cut_short, overwritten, spliced) for _ in range(3)),
)


def survives(data: bytes, read: Callable[[bytes], object]) -> bool:
    """Whether it is read; errors other than ExecutableInvalid propagate."""
    try:
        read(data)
    except ExecutableInvalid:
        return False
    return True
