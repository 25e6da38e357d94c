"""Hostile bytes: refused with a reason, in time and memory that their length bounds."""

import random
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice

import pytest

from nxpipe.emulator.executable.code import INSTRUCTIONS, kind_of
from nxpipe.emulator.executable.executable import Section, from_bytes, packed, to_bytes
from nxpipe.emulator.isa.affine import index
from nxpipe.emulator.isa.instruction import Engine, Wait
from nxpipe.emulator.isa.program import Loop
from tests.executable.damage import DAMAGES, parts, sealed, survives
from tests.executable.samples import instruction, sample, samples

BYTES_A_BYTE = 200  # what the reader may take for one byte of a file, objects included


def attack(inputs: int, seed: int) -> int:
    """How many of so many inputs were read: those must be what they say, byte by byte."""
    chance, whole, read = random.Random(seed), samples(4 * seed), 0

    def faithful(data: bytes) -> None:
        assert to_bytes(from_bytes(data)) == data

    for data in islice(damaged(chance, whole), inputs):
        read += survives(data, faithful)
    return read


def damaged(chance: random.Random, whole: Sequence[bytes]) -> Iterator[bytes]:
    """Each kind of damage in turn, as it is or sealed again; nothing twice, nor what that has made whole."""
    seen = set(map(hash, whole))
    for damage in cycle(DAMAGES):
        data = damage(chance, chance.choice(whole), whole)
        data = sealed(data) if chance.random() < 0.5 else data
        if hash(data) not in seen:
            seen.add(hash(data))
            yield data


def test_the_samples_hold_every_instruction_and_are_read() -> None:
    for seed, data in enumerate(samples()):
        assert from_bytes(data) == sample(seed)
    texts = parts(samples()[0])[Section.CODE]
    assert all(kind_of(record).text.encode() in texts for record in INSTRUCTIONS.values())


def test_two_thousand_attacks_end_in_a_sentence() -> None:
    assert attack(2_000, seed=1) > 0  # some damage, such as another number, is another sound executable


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 7))
def test_a_million_attacks_end_in_a_sentence(seed: int) -> None:
    assert attack(200_000, seed) > 0


LISTS = (Section.CODE, Section.NOTES, Section.BUFFERS, Section.INTERFACE, Section.DIVISIONS)


@pytest.mark.parametrize("section", LISTS)
@pytest.mark.parametrize("filler", [b"\0", b"\1", b"\2", b"\x7f", b"\0\1"])
def test_memory_is_bounded_by_the_length_of_the_file(section: Section, filler: bytes) -> None:
    """The longest lists that a section can claim, and what fills them."""
    size = 50_000
    prefix = b"\2v2\1" if section is Section.BUFFERS else b""
    content = prefix + b"\xd0\x86\x03" + (filler * size)[:size]
    data = packed({**parts(samples()[0]), section: content})
    assert bytes_taken(data) < BYTES_A_BYTE * len(data)


@pytest.mark.slow
def test_memory_is_bounded_where_everything_has_been_seen_before() -> None:
    """Ten thousand copies of one instruction that waits for everybody take a few bytes each in the file."""
    wait = tuple(Wait(engine, index(0) + 1) for engine in Engine)
    step = instruction("memset", 0)
    body = tuple(replace(step, waits=wait) for _ in range(10_000))
    executable = sample()
    data = to_bytes(replace(executable, program=replace(executable.program, body=(Loop(2, (Loop(2, body),)),))))
    assert bytes_taken(data) < BYTES_A_BYTE * len(data)


def bytes_taken(data: bytes) -> int:
    tracemalloc.start()
    survives(data, from_bytes)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most
