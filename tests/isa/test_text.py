"""Program text round-trips, and invalid text is refused with the place."""

import re
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role
from nxpipe.emulator.isa.program import instructions as listed
from nxpipe.emulator.isa.text import affine_text, labelled, text
from nxpipe.emulator.isa.vector import Memset
from tests.isa.assembler import TextInvalid, program
from tests.isa.page import EXAMPLE
from tests.isa.samples import around, inside, instructions, plain, programs, tile

HEAD = "core v2, ranks 1\ninput x: bf16[128,4096] at 0\n"
MEMSET = "vector memset sbuf[0:128, 0 : f32 8] <- value=1.0"


@given(programs())
def test_a_program_is_the_same_after_it_has_been_text(one: Program) -> None:
    written = text(one)
    assert program(written) == one
    assert text(program(written)) == written


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
@given(data=st.data())
def test_every_instruction_is_the_same_after_it_has_been_text(name: str, data: st.DataObject) -> None:
    one = around(data.draw(instructions(2, name)))
    assert program(text(one)) == replace(one, notes=program(text(one)).notes)


def test_minus_zero_stays_minus_zero() -> None:
    step = Memset(engine=Engine.VECTOR, dst=tile(128, 8), value=-0.0)
    (read,) = listed(program(text(around(step))).body)
    assert isinstance(read, Memset)
    assert str(read.value) == "-0.0"


@pytest.mark.parametrize("number", [True, 2, np.float32(0.1), np.float64(0.1)])
def test_a_number_is_written_as_a_number_whatever_holds_it(number: float) -> None:
    step = Memset(engine=Engine.VECTOR, dst=tile(128, 8), value=number)
    assert program(text(around(step))) == around(step)


def test_addresses_read_as_one_would_write_them() -> None:
    assert affine_text(Affine(4096) + index(0) * 1024 + index(1) * -1) == "4096+1024*i0-i1"
    assert affine_text(rotating_offset(index(0) + 2, 3, 512)) == "512*((2+i0) % 3)"
    assert affine_text(Affine()) == "0"


def test_buffers_are_called_by_their_names_and_no_two_alike() -> None:
    names = [("x",), ("x",), ("sbuf",), (), ("a b",), tuple(f"layers.{turn}.up" for turn in range(32))]
    buffers = [Buffer(Role.SCRATCH, name, DType.FLOAT32, (1,)) for name in names]
    buffers.append(Buffer(Role.CONSTANT, ("0123456789abcdef" * 4,), DType.FLOAT32, (1,)))
    assert labelled(buffers) == ("x", "x~2", "sbuf~2", "buffer", "a_b", "layers.*.up", "constant.01234567")


def test_equal_weights_of_all_layers_take_one_line() -> None:
    names = tuple(f"layers.{turn}.up" for turn in range(32))
    one = Program("v2", 1, (Buffer(Role.PARAMETER, names, DType.BFLOAT16, (4, 4)),), ())
    assert text(one).splitlines()[1] == 'parameter layers.*.up: bf16[4,4] at 0 names "layers." 0..31 ".up"'


def test_the_fused_linear_and_gelu_of_the_page_fits_a_screen() -> None:
    assert len(text(program(EXAMPLE)).splitlines()) <= 24


def test_the_listing_of_one_engine_has_its_instructions_and_the_loops_around_them() -> None:
    only = text(program(EXAMPLE), only=Engine.SCALAR)
    assert [line.split()[0] for line in only.splitlines() if line.startswith(("loop", " "))] == ["loop", "at", "scalar"]


def test_the_place_in_the_model_is_told_once_for_all_instructions_from_it() -> None:
    step = plain("memset", Engine.VECTOR)
    noted = replace(step, note=1)
    one = replace(around(step, noted, noted, inside(2, body=(noted, step))), notes=("", "mlp.up"))
    places = [line.strip() for line in text(one).splitlines() if line.strip().startswith("at ")]
    assert places == ["at 1  # mlp.up", "at 0"]
    assert program(text(one)) == one


@pytest.mark.parametrize(
    ("written", "line", "column", "expected"),
    [
        ("", 1, 1, "'core'"),
        ("core v2", 1, 8, "','"),
        ("core v2, ranks many", 1, 16, "a whole number"),
        (HEAD + "vector memse sbuf", 3, 8, "an instruction: dma_copy"),
        (HEAD + "vectr memset", 3, 1, "a line that begins with: input"),
        (HEAD + "vector memset sbuf[0:128, 0 : bf17 8] <- value=1.0", 3, 31, "a type: f32"),
        (HEAD + "vector memset sbuf[0:128, 0 : f32 8] value=1.0", 3, 38, "'<-'"),
        (HEAD + "vector memset sbuf[0:128, 0 : f32 8] <- worth=1.0", 3, 47, "the value of one of value"),
        (HEAD + "vector memset x[0 : f32 8] <- value=1.0", 3, 15, "a memory: sbuf, psum"),
        (HEAD + "vector tensor_tensor sbuf[0:1, 0 : f32] <- left=sbuf[0:1, 0 : f32]", 3, 67, "also right="),
        (HEAD + MEMSET + " and more", 3, 51, "the end of the line"),
        (HEAD + MEMSET + " after vector", 3, 63, "'>='"),
        (HEAD + "  " + MEMSET, 3, 3, "at most 0 spaces"),
        (HEAD + "loop i1 < 4:", 3, 6, "'i0'"),
        (HEAD + "dma0 dma_copy sbuf[0:1, 0 : f32] <- z[0 : f32]", 3, 37, "sbuf, psum or the label"),
        (HEAD + "input x: f32[1] at 0", 3, 8, "an unused label"),
        (HEAD + 'note 2 "later"', 3, 6, "'1'"),
        (HEAD + 'note 1 "\\x"', 3, 8, "a string with the escapes"),
        (HEAD + "bytes 12", 3, 7, "a string in quotes"),
        (HEAD + "vector memset sbuf[0:128, 0*(i0 % 0) : f32 8] <- value=1.0", 3, 36, "at least one turn"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place_and_what_belongs_there(
    written: str, line: int, column: int, expected: str
) -> None:
    with pytest.raises(TextInvalid) as refused:
        program(written)
    assert (refused.value.line, refused.value.column) == (line, column), str(refused.value)
    assert refused.value.expected.startswith(expected)


@pytest.mark.parametrize(
    "hostile",
    [
        HEAD + "vector memset sbuf[0:1, 0 : f32 " + "x".join(["9" * 20] * 100_000) + "] <- value=1.0",
        HEAD + "vector memset sbuf[0:1, " + "+".join(["i0"] * 100_000) + " : f32] <- value=1.0",
        HEAD + "vector memset sbuf[0:1, " + "(" * 100_000 + " : f32] <- value=1.0",
        HEAD + "\n".join(f"{'  ' * depth}loop i{depth} < 2:" for depth in range(200)),
        HEAD + 'parameter w: f32[1] at 0 names "a" 0..999999999 "b"',
        HEAD + "\n".join(f'parameter w{n}: f32[1] at 0 names "a" 0..60000 "b"' for n in range(200)),
        HEAD + "input y: f32[" + ",".join(["9"] * 100_000) + "] at 0",
        HEAD + "vector memset sbuf[0:1, 0 : f32] <- value=" + "9" * 1_000_000,
        "core v2, ranks " + "9" * 1_000_000,
    ],
)
def test_text_that_asks_for_more_than_it_is_long_is_refused(hostile: str) -> None:
    with pytest.raises(TextInvalid):
        program(hostile)


@given(at=st.floats(0, 1), width=st.integers(0, 30), other=st.text(max_size=20) | st.sampled_from(EXAMPLE.split()))
def test_any_text_in_the_place_of_any_other_is_read_or_refused(at: float, width: int, other: str) -> None:
    start = int(at * len(EXAMPLE))
    with suppress(TextInvalid):
        program(EXAMPLE[:start] + other + EXAMPLE[start + width :])


def test_comments_and_blank_lines_do_not_count() -> None:
    busy = re.sub(r"$", "  # so it is", EXAMPLE, flags=re.MULTILINE).replace("\n", "\n\n")
    assert program(busy) == program(EXAMPLE)


def test_a_loop_without_a_body_is_a_loop() -> None:
    assert program(HEAD + "loop i0 < 3:\n").body == (Loop(3, ()),)


def test_waits_stand_last() -> None:
    step: Instruction = plain("memset", Engine.VECTOR).after(Wait(Engine.DMA0, index(0) * 2 + -1))
    assert text(around(inside(4, body=(step,)))).splitlines()[-1].endswith("  after dma0>=-1+2*i0")
