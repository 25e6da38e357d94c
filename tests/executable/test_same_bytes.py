"""The same graph makes the same executable and the same HLO: in every process, whatever the order of its sets, and on
every Python (without jaxlib the text of the module, and no proto)."""

import os
import subprocess
import sys
from functools import cache
from typing import Final

import pytest

from tests.artifact_store.test_keys import pythons
from tests.conftest import ROOT
from tests.executable.digests import digests_of
from tests.models_isa.small import compiled, wanted

# Family, class and phase of each; on how many ranks, and of which cores.
MODELS: Final = {
    "bert": (("bert", None, "forward"), 1, "v3"),
    "llama on two ranks": (("llama", "LlamaForCausalLM", "decode"), 2, "v2"),
}


def _runs_emulator(python: str) -> bool:
    code = "import sys, numpy, ml_dtypes; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


@cache
def here(model: str) -> tuple[str, ...]:
    asked, degree, core = MODELS[model]
    return digests_of(compiled(wanted(*asked), degree=degree, core=core), core)


def elsewhere(python: str, model: str, seed: str) -> tuple[str, ...]:
    asked, degree, core = MODELS[model]
    ran = subprocess.run(
        [python, str(ROOT / "tests/executable/digests.py"), str(degree), core],
        input=compiled(wanted(*asked), core=core).whole.to_bytes(),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
    )
    return tuple(ran.stdout.decode().split())


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", ["0", "4294967295"])
@pytest.mark.parametrize("model", MODELS)
def test_another_process_makes_the_same_bytes(model: str, seed: str) -> None:
    assert elsewhere(sys.executable, model, seed) == here(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_every_python_of_this_machine_makes_the_same_bytes(model: str) -> None:
    emulators = list(filter(_runs_emulator, pythons()))
    for python in emulators:
        found = elsewhere(python, model, "1")
        assert found == here(model)[: len(found)]
    assert sys.executable in emulators
