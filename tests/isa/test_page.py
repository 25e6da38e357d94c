"""docs/reference/isa.md is the specification: its tables, examples and programs are what the code does."""

import re
from math import ceil, floor

import pytest

from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.constraints import Rule
from nxpipe.emulator.isa.cost import cost
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.isa.program import Program
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.isa.text import text
from tests.isa.assembler import program
from tests.isa.page import EXAMPLES, PAGE, sections, table
from tests.isa.samples import plain

FIGURES = table("", "v2", "v3", "v4")
ROWS = {row[0]: row[1:] for row in table("instruction", "engines", "cycles")}
REFUSED = table("core", "instruction", "rule")
PRICES = table("instruction", "v2", "v3", "v4")


def alone(line: str, core: str) -> Program:
    return program(f"core {core}, ranks 1\ninput x: bf16[128,4096] at 0\n{line}")


def test_every_instruction_has_a_row_and_a_section_and_no_others_do() -> None:
    assert list(ROWS) == list(INSTRUCTIONS) == list(sections())


@pytest.mark.parametrize("figure", FIGURES, ids=lambda row: row[0].split("`")[0])
def test_the_figures_of_the_generations_are_those_of_the_catalogue(figure: list[str]) -> None:
    name = figure[0].partition("`")[0]
    assert [str(getattr(core, name)) for core in CORES.values()] == figure[1:]


@pytest.mark.parametrize("name", sorted(INSTRUCTIONS))
def test_the_engines_of_a_row_are_those_that_carry_the_instruction_out(name: str) -> None:
    written: dict[Engine, int] = {}
    for entry in ROWS[name][0].split(", "):
        word, _, since = entry.partition(" ")
        generation = int(since.strip("(v)")) if since else 2
        written |= dict.fromkeys(DMA_QUEUES if word == "dma" else (Engine(word),), generation)
    assert INSTRUCTIONS[name].engines == written


@pytest.mark.parametrize("size", [30, 240, 600])
@pytest.mark.parametrize("name", [name for name in sorted(INSTRUCTIONS) if ROWS[name][1] != "DMA"])
def test_the_cycles_of_a_row_are_what_a_plain_instruction_costs(name: str, size: int) -> None:
    """A formula out of the page, with the sizes of an instruction in it."""
    engine = next(iter(INSTRUCTIONS[name].engines))
    one = plain(name, engine, 96, size)
    known = {"max": max, "min": min, "ceil": ceil} | sizes(one)
    for core in CORES.values():
        assert cost(one, core).cycles == eval(ROWS[name][1], {"__builtins__": {}}, known)


def sizes(one: Instruction) -> dict[str, int]:
    if isinstance(one, Matmul):
        return {"M": one.stationary.elements, "N": one.moving.elements}
    source = next(place for key, place in one.places.items() if key != "dst" or len(one.places) == 1)
    assert isinstance(source, Tile)
    return {"N": source.elements, "P": source.partitions}


@pytest.mark.parametrize("name", [name for name in sorted(INSTRUCTIONS) if ROWS[name][1] == "DMA"])
def test_what_the_page_prices_as_dma_has_a_time_and_no_cycles(name: str) -> None:
    price = cost(plain(name, next(iter(INSTRUCTIONS[name].engines))), CORES["v3"])
    assert price.cycles is None
    assert price.ns > 0


def test_the_rules_of_the_page_are_those_that_faults_name() -> None:
    assert [row[0] for row in table("rule", "refused")] == list(Rule)


@pytest.mark.parametrize(("core", "line", "rule"), REFUSED)
def test_what_the_page_refuses_is_refused_by_that_rule_and_no_other(core: str, line: str, rule: str) -> None:
    assert {fault.rule for fault in faults(alone(line, core))} == {Rule(rule)}


@pytest.mark.parametrize("row", PRICES, ids=lambda row: row[0])
def test_what_the_page_prices_is_legal_and_costs_that(row: list[str]) -> None:
    for core, price in zip(CORES.values(), row[1:], strict=True):
        one = alone(row[0], core.name)
        (step,) = one.body
        assert isinstance(step, Instruction)
        paid = cost(step, core)
        assert faults(one) == []
        assert floor((paid.cycles or paid.ns) + 0.5) == int(price)


def test_the_page_names_every_function_and_every_type() -> None:
    (functions,) = re.findall(r"`(copy\s+square\s[^`]*)`", PAGE)
    assert functions.split() == [function.value for function in Function]
    (types,) = re.findall(r"^Types: [^`]*`([^`]*)`", PAGE, re.MULTILINE)
    assert set(types.split()) == {dtype.short for dtype in DType if dtype not in (DType.INT64, DType.UINT64)}


@pytest.mark.parametrize("written", EXAMPLES)
def test_the_programs_of_the_page_are_legal_and_written_as_the_disassembler_writes_them(written: str) -> None:
    one = program(written)
    assert faults(one) == []
    assert text(one) == written
