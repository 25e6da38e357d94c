"""`nxpipe dis`: an executable file as text."""

import json
from pathlib import Path

import pytest

from nxpipe.emulator.analysis.utilization import utilisation
from nxpipe.emulator.executable.executable import Executable, to_bytes
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.pipeline.cli.dis import ENGINES
from tests.executable.samples import samples
from tests.isa.assembler import program
from tests.isa.page import EXAMPLE
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]  # the fixture


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "up.nxe"
    path.write_bytes(to_bytes(Executable(program(EXAMPLE))))
    return path


def test_the_text_of_a_file_is_its_program(nxpipe: InProcess, file: Path) -> None:
    answer = nxpipe("dis", str(file), "--tables")
    assert answer.code == 0, answer.err
    assert program(answer.out) == program(EXAMPLE)


def test_one_engine_can_be_read_alone(nxpipe: InProcess, file: Path) -> None:
    answer = nxpipe("dis", str(file), "--only", "tensor")
    assert [line.split()[1] for line in answer.out.splitlines() if line.split()[:1] == ["tensor"]] == ["nc_matmul"]
    assert "activation" not in answer.out


def test_totals_are_a_page_for_people_and_a_document_for_machines(nxpipe: InProcess, file: Path) -> None:
    page = nxpipe("dis", str(file), "--totals")
    assert "6 instructions in the text, 25 executed" in page.out
    document = json.loads(nxpipe("dis", str(file), "--totals", "--json").out)
    assert document["totals"]["by_kind"] == {"activation": 4, "dma_copy": 13, "nc_matmul": 8}
    used = utilisation(program(EXAMPLE))
    assert page.out.endswith(f"\n{used.sentence()}\n")
    assert document["utilisation"] == json.loads(json.dumps(used.document()))


def test_a_program_that_breaks_a_rule_can_be_read_but_not_added_up(nxpipe: InProcess, tmp_path: Path) -> None:
    path = tmp_path / "illegal.nxe"
    path.write_bytes(samples()[0])
    assert "nc_matmul" in nxpipe("dis", str(path)).out
    answer = nxpipe("dis", str(path), "--totals")
    assert (answer.code, answer.out) == (14, "")
    assert f"{path}: the program is not legal" in answer.err


def test_a_file_that_is_no_executable_is_refused_with_a_sentence(nxpipe: InProcess, tmp_path: Path) -> None:
    path = tmp_path / "not.nxe"
    path.write_bytes(b"not an executable")
    answer = nxpipe("dis", str(path))
    assert (answer.code, answer.out) == (14, "")
    assert "the executable is invalid at byte" in answer.err


def test_words_that_contradict_each_other_are_refused(nxpipe: InProcess, file: Path) -> None:
    assert nxpipe("dis", str(file), "--totals", "--only", "tensor").code == 2


def test_the_engines_of_the_command_are_those_of_the_machine() -> None:
    assert list(Engine) == list(ENGINES)
