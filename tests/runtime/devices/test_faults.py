"""The page of devices lists each status with its error, and the same table decides in the code."""

import re
import subprocess
import sys

import pytest

from nxpipe.emulator.run.devices.faults import (
    MEANINGS,
    NoDevice,
    RankFailed,
    fault_named,
    fault_of,
)
from nxpipe.emulator.run.devices.ranks import document_of
from nxpipe.emulator.run.status import RuntimeFault, Status, WrongGeneration
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "devices.md").read_text()
ROWS = re.findall(r"^\| (NRT_\w+) \| (\d+) \| `(\w+)` \| (yes|no) \|", PAGE, re.M)


def test_the_page_has_the_error_of_every_status_and_whether_it_is_retryable() -> None:
    assert {(name, int(number), kind, retryable == "yes") for name, number, kind, retryable in ROWS} == {
        (status.name, status.value, meaning.fault.__name__, not meaning.fault.deterministic)
        for status, meaning in MEANINGS.items()
    }
    assert set(Status) == {Status.NRT_SUCCESS, *MEANINGS}


@pytest.mark.parametrize("status", MEANINGS)
def test_an_error_is_one_sentence_with_the_call_the_status_and_a_remedy(status: Status) -> None:
    fault = fault_of(status, "executing decode on core 0")
    prefix = f"executing decode on core 0 failed with {status.name} ({status.value}): "
    assert str(fault) == prefix + MEANINGS[status].remedy
    assert "\n" not in str(fault)
    assert not str(fault).endswith(".")
    assert fault.status is status


def test_a_hardware_error_during_a_load_is_a_program_for_another_target() -> None:
    fault = fault_of(6, "loading decode.neff", on_load=True)
    assert isinstance(fault, WrongGeneration)
    assert (fault.status, "build it for this instance" in str(fault)) == (Status.NRT_HW_ERROR, True)


@pytest.mark.parametrize("fault", [fault_of(1006, "x"), fault_of(1203, "x"), NoDevice("none is here")])
def test_an_error_of_a_rank_process_keeps_its_type_and_sentence(fault: RuntimeFault) -> None:
    document = document_of(fault)
    again = fault_named(document["fault"], document["message"], document["status"])
    assert (type(again), str(again), again.status) == (type(fault), str(fault), fault.status)


def test_another_error_of_a_rank_process_names_its_type() -> None:
    document = document_of(KeyError("weights"))
    assert document == {"fault": "RankFailed", "message": "KeyError: 'weights'", "status": 1}
    assert isinstance(fault_named("Unheard", "of", 1), RankFailed)


def test_the_page_names_each_variable_that_the_environment_sets() -> None:
    source = (ROOT / "emulator" / "run" / "devices" / "environment.py").read_text()
    names = set(re.findall(r'"((?:NEURON|LD)_\w+)"', source))
    assert names
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_stand_ins_are_no_part_of_the_product() -> None:
    product = [path for folder in ("emulator", "pipeline") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in product if "STANDIN" in path.read_text()] == []


def test_a_rank_process_imports_neither_torch_nor_jax_nor_a_runtime_before_it_opens_one() -> None:
    script = (
        "import sys, nxpipe.emulator.run.devices.rank_process, nxpipe.emulator.run.devices.session; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "jax", "jaxlib", "transformers", "nrtpy", "boto3", "pydantic", "click"}
    assert heavy.isdisjoint(answer.stdout.split())


def test_no_module_imports_nrtpy_before_a_runtime_is_opened() -> None:
    sources = [path.read_text() for path in (ROOT / "emulator" / "run" / "devices").glob("*.py")]
    assert sources
    assert not any(re.search(r"^\s*(import|from) nrtpy", source, re.M) for source in sources)
