"""Every record of the instruction set has all that an instruction needs, beside it or in the module of its name."""

import pytest

from nxpipe.emulator.core import engines
from nxpipe.emulator.core.engines import EXCHANGES, HANDLERS
from nxpipe.emulator.executable.code import INSTRUCTIONS, kind_of
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.cost import cost
from nxpipe.emulator.isa.instruction import Instruction
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.text import text
from tests.core import test_instructions, test_machine, test_moving
from tests.isa.assembler import program
from tests.isa.page import sections, table
from tests.isa.samples import around, plain

RECORDS = pytest.mark.parametrize("record", INSTRUCTIONS.values(), ids=INSTRUCTIONS)
ROWS = [row[0] for row in table("instruction", "engines", "cycles")]


@RECORDS
def test_a_record_states_its_engines_and_they_have_a_legal_sample_on_each_generation(record: type[Instruction]) -> None:
    assert record.engines
    for engine, since in record.engines.items():
        for core in CORES.values():
            legal = not faults(around(plain(record.name, engine), core=core.name))
            assert legal == (core.nki_gen >= since)


@RECORDS
def test_a_record_states_its_own_limits_and_cost(record: type[Instruction]) -> None:
    assert "violations" in vars(record)
    dma = all(cost(plain(record.name, engine), CORES["v3"]).cycles is None for engine in record.engines)
    assert dma or "cycles" in vars(record)


@RECORDS
def test_the_semantics_of_a_record_are_one_handler_of_the_engines(record: type[Instruction]) -> None:
    handler = EXCHANGES[record] if record in EXCHANGES else HANDLERS[record]
    assert handler.__module__ == engines.__name__
    assert (record in HANDLERS) != (record in EXCHANGES)


@RECORDS
def test_a_record_has_a_row_and_a_section_on_the_page(record: type[Instruction]) -> None:
    assert ROWS.count(record.name) == 1
    assert sections()[record.name].strip()


@RECORDS
def test_a_record_can_be_written_as_text_and_in_an_executable(record: type[Instruction]) -> None:
    (engine, *_) = record.engines
    sample = around(plain(record.name, engine))
    assert program(text(sample)) == sample
    assert kind_of(record).text.startswith(record.name)


@RECORDS
def test_the_semantics_of_a_record_are_tested(record: type[Instruction]) -> None:
    assert any(record in vars(module).values() for module in (test_instructions, test_machine, test_moving))
