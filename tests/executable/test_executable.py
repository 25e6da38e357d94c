"""The bytes of an executable determine it; other bytes are refused with the place."""

import hashlib
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxpipe.emulator.errors import ExecutableInvalid
from nxpipe.emulator.executable import code
from nxpipe.emulator.executable.code import INSTRUCTIONS, kind_of
from nxpipe.emulator.executable.executable import (
    BODY,
    LARGE_CONSTANT,
    LONGEST_FILE,
    MAGIC,
    VERSION,
    Executable,
    Section,
    from_bytes,
    packed,
    read,
    to_bytes,
)
from nxpipe.emulator.executable.field_codecs import LONGEST_TEXT, Reader, Writer
from nxpipe.emulator.executable.tables import MOST_RANKS, MOST_TENSORS
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset, index
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine, Wait
from nxpipe.emulator.isa.operands import Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.vector import Memset
from tests.executable.damage import DAMAGES, parts, sealed, survives
from tests.executable.random_programs import executables
from tests.tiers import examples

F32 = DType.FLOAT32
TILE = Tile(Memory.SBUF, F32, 0, 128, Affine(), contiguous(512))
BUFFERS = (Buffer(Role.SCRATCH, ("x",), F32, (128, 512)),)
PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "nxe.md").read_text()
# Drawing programs costs more than reading them.
LARGE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def memset(**changes: object) -> Memset:
    return replace(Memset(engine=Engine.VECTOR, dst=TILE, value=0.0), **changes)  # type: ignore[arg-type]


def program(*body: object, **fields: object) -> Executable:
    return Executable(Program("v2", 1, BUFFERS, body, **fields))  # type: ignore[arg-type]


def with_section(executable: Executable, section: Section, content: bytes) -> bytes:
    return packed({**parts(to_bytes(executable)), section: content})


def numbers(*values: int) -> bytes:
    out = Writer()
    for value in values:
        out.number(value)
    return bytes(out.data)


@LARGE
@given(executables())
def test_what_is_written_is_read(executable: Executable) -> None:
    data = to_bytes(executable)
    assert from_bytes(data) == executable
    assert to_bytes(from_bytes(data)) == data


@pytest.mark.parametrize("record", INSTRUCTIONS.values(), ids=list(INSTRUCTIONS))
def test_every_instruction_has_a_spelling(record: type) -> None:
    assert all(f"`{form.removesuffix('?')}`" in PAGE for _, form in kind_of(record).fields)


@settings(LARGE, max_examples=15)
@given(st.lists(executables(), min_size=2, max_size=2), st.randoms(use_true_random=False))
def test_damaged_bytes_are_refused_or_are_the_bytes_of_what_they_say(
    several: list[Executable], chance: random.Random
) -> None:
    whole = [to_bytes(executable) for executable in several]
    for damage in DAMAGES:
        for data in (damage(chance, whole[0], whole), sealed(damage(chance, whole[0], whole))):
            if survives(data, from_bytes):
                assert to_bytes(from_bytes(data)) == data


@settings(LARGE, max_examples=examples(50))
@given(executables(), st.data())
def test_a_file_in_which_one_bit_changed_is_refused(executable: Executable, data: st.DataObject) -> None:
    good = to_bytes(executable)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ExecutableInvalid):
        from_bytes(bytes(bad))


@given(st.binary(max_size=600))
def test_noise_is_refused(noise: bytes) -> None:
    for data in (noise, MAGIC + noise):
        with pytest.raises(ExecutableInvalid):
            from_bytes(data)


@given(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_a_number_has_one_spelling(number: int, signed: int) -> None:
    out = Writer()
    out.number(number)
    out.signed(signed)
    source = Reader(bytes(out.data), 0, len(out.data))
    assert (source.number(), source.signed()) == (number, signed)
    source.end()
    longer = numbers(number)[:-1] + bytes([numbers(number)[-1] | 0x80, 0])
    with pytest.raises(ExecutableInvalid, match=r"64 bits|longer"):
        Reader(longer, 0, len(longer)).number()


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_beyond_64_bits_is_not_written(number: int) -> None:
    with pytest.raises(ExecutableInvalid, match="64 bits"):
        to_bytes(program(memset(dst=replace(TILE, partitions=number))))


def test_layers_of_a_loop_and_what_comes_again_cost_next_to_nothing() -> None:
    body = [memset(waits=(Wait(Engine.SCALAR, Affine()),)) for _ in range(100)]
    longer = len(to_bytes(program(*body, *body))) - len(to_bytes(program(*body)))
    assert longer <= 100 * 10
    assert len(to_bytes(program(Loop(80, tuple(body))))) - len(to_bytes(program(*body))) < 30


def test_a_wait_for_all_before_is_the_same_wherever_it_stands() -> None:
    """Told by how far back it looks, not by a count that grows along the program."""
    step = memset(engine=Engine.SCALAR)
    waits = [(step, memset(waits=(Wait(Engine.SCALAR, Affine(number + 1)),))) for number in range(50)]
    code = parts(to_bytes(program(*(entry for pair in waits for entry in pair))))[Section.CODE]
    first, second = (memset(waits=(Wait(Engine.SCALAR, Affine(number)),)) for number in (1, 1))
    few = parts(to_bytes(program(step, first, step, second)))[Section.CODE]
    assert len(code) < len(few) + 96 * 10


def test_sections_lie_as_the_page_says() -> None:
    data = to_bytes(program(memset()))
    assert data.startswith(bytes.fromhex(re.search(r"`(89 [0-9A-F ]+)`", PAGE)[1]))  # type: ignore[index]
    assert f"| 8 | 4 | version: {VERSION} |" in PAGE
    assert f"| 12 | 4 | number of sections: {len(Section)} |" in PAGE
    assert f"| {BODY} | | the sections" in PAGE
    assert re.findall(r"^\| (\d) \| ([a-z]\w+) \|", PAGE, re.M) == [(str(int(s)), s.label) for s in Section]
    offset = BODY
    for number, (section, content) in enumerate(parts(data).items()):
        row = data[16 + 52 * number :][:52]
        places = (section.to_bytes(4, "little"), offset.to_bytes(8, "little"), len(content).to_bytes(8, "little"))
        assert row == b"".join([*places, hashlib.sha256(content).digest()])
        offset += len(content)


def test_limits_are_those_of_the_page() -> None:
    rows = dict(re.findall(r"^\| ([a-z][^|]+) \| (\d[\d^]*) \|$", PAGE, re.M))
    assert {name: 2 ** int(text[2:]) if "^" in text else int(text) for name, text in rows.items()} == {
        "instructions and loops in the text": code.MOST_STEPS,
        "loops around an instruction": code.MOST_LOOPS,
        "terms of an affine number": code.MOST_TERMS,
        "rotating offsets of an affine number": code.MOST_ROTATIONS,
        "axes of a place, and step sizes": code.MOST_AXES,
        "waits of an instruction": code.MOST_WAITS,
        "terms of all waits together": code.MOST_TERMS_OF_WAITS,
        "axes of a tensor": 16,
        "elements of a tensor": 2**48,
        "tensors of a buffer": MOST_TENSORS,
        "parts of a divided axis, and ranks": MOST_RANKS,
        "instructions executed in one run": code.MOST_EXECUTED,
    }
    assert f"at most {LONGEST_FILE >> 20} MiB" in PAGE
    assert f"at most {LONGEST_TEXT}" in PAGE


def nested(loops: int, count: int = 2) -> Executable:
    body: tuple[object, ...] = (memset(dst=replace(TILE, offset=index(loops - 1))),)
    for _ in range(loops):
        body = (Loop(count, body),)  # type: ignore[arg-type]
    return program(*body)


def test_sixteen_loops_are_enough_and_seventeen_too_many() -> None:
    assert from_bytes(to_bytes(nested(16))) == nested(16)
    with pytest.raises(ExecutableInvalid, match="16 loops"):
        to_bytes(nested(17))


def test_a_run_that_never_ends_is_refused() -> None:
    with pytest.raises(ExecutableInvalid, match="executes more than"):
        to_bytes(nested(4, 2**11))


def test_a_loop_that_lies_about_its_body_is_refused() -> None:
    good = to_bytes(program(Loop(3, (memset(), memset()))))
    code = parts(good)[Section.CODE]
    at = code.index(b"vector") + len(b"vector")
    assert code[at] == 2
    lie = code[:at] + b"\x03" + code[at + 1 :]
    with pytest.raises(ExecutableInvalid, match="instruction counts of a loop") as fault:
        from_bytes(with_section(program(Loop(3, (memset(), memset()))), Section.CODE, lie))
    assert fault.value.offset == BODY + good[BODY:].index(code) + len(code)


def test_totals_are_those_of_the_code() -> None:
    executable = program(memset(), Loop(5, (memset(), memset(engine=Engine.SCALAR))))
    assert executable.counts.instructions == 3
    assert executable.counts.executed == {Engine.SCALAR: 5, Engine.VECTOR: 6}
    other = parts(to_bytes(program(memset())))[Section.TOTALS]
    with pytest.raises(ExecutableInvalid, match="totals"):
        from_bytes(with_section(executable, Section.TOTALS, other))


@pytest.mark.parametrize(
    ("section", "content", "reason"),
    [
        (Section.NOTES, numbers(2**50), "should follow"),
        (Section.CODE, numbers(2**50), "should follow"),
        (Section.BUFFERS, numbers(2) + b"v2" + numbers(1, 2**50), "should follow"),
        (Section.BUFFERS, numbers(2) + b"v9" + numbers(1, 0), "unknown core 'v9'"),
        (Section.BUFFERS, numbers(2) + b"v2" + numbers(2**40, 0), "ranks"),
        (Section.BUFFERS, numbers(2) + b"v2" + numbers(1, 0), "no buffer 0 among 0"),
        (Section.NOTES, numbers(0), "no note 0 among 0"),
        (Section.NOTES, numbers(1, 2**40), "a text has"),
        (Section.NOTES, numbers(1, 2) + b"\xff\xfe", "not UTF-8"),
        (Section.NOTES, numbers(1, 0, 0), "remain at the end"),
        (Section.DIVISIONS, numbers(1, 1, 0, 1, 128, 3, 1, 42), "does not fit buffer 0"),
        (Section.DIVISIONS, numbers(1, 1, 0, 1, 128, 0, 1, 128), "does not fit buffer 0"),
        (Section.DIVISIONS, numbers(1, 1, 0, 1, 256, 2, 1, 128), "does not fit buffer 0"),  # half of it has no place
        (Section.DIVISIONS, numbers(1, 1, 0, 1, 2**62, 1, 1, 128), "does not fit buffer 0"),
        (Section.DIVISIONS, numbers(1, 1, 0, 1, 127, 1, 1, 128), "does not fit buffer 0"),  # longer than all there is
        (Section.DIVISIONS, numbers(1, 1, 0, 1, 128, 1, 2, 64), "does not fit buffer 0"),  # more slots than parts
        (Section.DIVISIONS, numbers(1, 1, 0, 2, 128, 1, 1, 128, 0, 1, 2**62, 0), "does not fit buffer 0"),
        (Section.DIVISIONS, numbers(1, 9, 0, 1, 128, 1, 1, 128), "buffer 8 of 1"),
        (Section.CONSTANTS, numbers(1) + hashlib.sha256(b"abc").digest() + numbers(3) + b"abc", "has no buffer"),
        (Section.INTERFACE, numbers(1, 1) + b"y" + numbers(0, 6) + b"output" + numbers(0, 7) + b"float32\0\0", "'y'"),
    ],
)
def test_a_section_that_says_what_cannot_be_is_refused(section: Section, content: bytes, reason: str) -> None:
    far = Far(0, F32, Affine(), contiguous(128, 512))
    executable = program(DmaCopy(engine=Engine.DMA0, dst=TILE, src=far))
    with pytest.raises(ExecutableInvalid, match=re.escape(reason)):
        from_bytes(with_section(executable, section, content))


def test_a_number_of_a_loop_that_is_not_around_it_is_refused() -> None:
    inside = memset(dst=replace(TILE, offset=index(0)))
    with pytest.raises(ExecutableInvalid, match="1 loops inside 0"):
        from_bytes(to_bytes(program(Loop(2, (inside,)), inside)))


def test_an_instruction_that_gained_a_field_is_another_one() -> None:
    good = to_bytes(program(memset()))
    code = parts(good)[Section.CODE].replace(b"value:real", b"value:flag")
    with pytest.raises(ExecutableInvalid, match=r"does not support the instruction 'memset dst:tile value:flag'"):
        from_bytes(with_section(program(memset()), Section.CODE, code))


def test_a_value_that_is_written_twice_is_refused() -> None:
    """There is one spelling: what came before is named by how long ago that was."""
    once = to_bytes(program(memset(value=1.5), memset(value=1.5)))
    code = parts(once)[Section.CODE]
    twice = code[:-1] + code[code.index(b"\0\0\0\0\0\0\xf8\x3f") - 1 :][:9]
    with pytest.raises(ExecutableInvalid, match="not the canonical form"):
        from_bytes(with_section(program(memset(value=1.5), memset(value=1.5)), Section.CODE, twice))


def test_equal_programs_have_equal_bytes_however_their_objects_are_shared() -> None:
    one = program(memset(), memset())
    apart = program(*(memset(dst=Tile(Memory.SBUF, F32, 0, 128, Affine(0 + zero), contiguous(512))) for zero in (0, 0)))
    assert to_bytes(one) == to_bytes(apart)


def test_a_program_has_the_same_bytes_on_every_machine_and_python() -> None:
    """Whoever changes these bytes changes the format: its page, and its version."""
    step = memset(value=0.1, waits=(Wait(Engine.SCALAR, Affine(3)),))
    executable = program(memset(), Loop(7, (step, replace(step, dst=replace(TILE, offset=index(0) * 64)))))
    digest = "5eb8754bf46697bc0d97c1dcd08b6bb725dec654ed876dc5aaa724cb6bff5298"
    assert hashlib.sha256(to_bytes(executable)).hexdigest() == digest


@pytest.mark.parametrize(
    "offset", [Affine(0, ((0, 0),)), Affine(0, ((1, 2), (0, 2))), Affine(0, (), (RotatingOffset(1, 1, Affine()),))]
)
def test_a_number_in_another_than_its_canonical_form_is_not_written(offset: Affine) -> None:
    with pytest.raises(ExecutableInvalid, match=r"ascend|RotatingOffset"):
        to_bytes(program(Loop(2, (Loop(2, (memset(dst=replace(TILE, offset=offset)),)),))))


def test_zeros_of_both_signs_and_not_a_number_are_kept() -> None:
    tile = replace(TILE, dtype=DType.BFLOAT16)
    reals = (0.0, -0.0, float("nan"), float("-inf"), 5e-324)
    data = to_bytes(program(*(memset(dst=tile, value=real) for real in reals)))
    assert [repr(step.value) for step in from_bytes(data).program.body] == [repr(real) for real in reals]  # type: ignore[union-attr]


def test_large_constants_are_left_out_and_given_back() -> None:
    small, large = b"\1" * 4, b"\2" * LARGE_CONSTANT
    names = [hashlib.sha256(data).hexdigest() for data in (small, large)]
    buffers = tuple(
        Buffer(Role.CONSTANT, (name,), DType.UINT8, (len(data),))
        for name, data in zip(names, (small, large), strict=True)
    )
    whole = Executable(Program("v2", 1, buffers, (), constants=dict(zip(names, (small, large), strict=True))))
    stored, beside = whole.without_large_constants()
    assert beside == {names[1]: large}
    again = from_bytes(to_bytes(stored))
    assert again.absent_constants == (names[1],)
    assert len(to_bytes(stored)) < LARGE_CONSTANT
    assert again.with_constants(beside) == whole
    with pytest.raises(ExecutableInvalid, match="damaged"):
        from_bytes(to_bytes(stored.with_constants({names[1]: small * (LARGE_CONSTANT // 4)})))


def test_fields_that_may_be_numbers_or_columns_keep_which() -> None:
    column = Tile(Memory.SBUF, F32, 0, 128, Affine(), contiguous(1))
    step = Activation(engine=Engine.SCALAR, dst=TILE, src=TILE, function=Function.EXP, scale=column, bias=2.0)
    assert from_bytes(to_bytes(program(step))).program.body == (step,)


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    (tmp_path / "a.nxe").write_bytes(to_bytes(program(memset())))
    assert read(tmp_path / "a.nxe") == program(memset())
