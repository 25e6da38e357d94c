"""The same graph makes the same executable: in every process, whatever the order of its sets, and on every Python."""

import hashlib
import os
import subprocess
import sys
from functools import cache
from typing import Final

import pytest

from nxpipe.emulator.compile import emit
from nxpipe.emulator.executable.executable import to_bytes
from tests.artifact_store.test_keys import pythons
from tests.conftest import ROOT
from tests.models_isa.small import compiled, wanted

# Family, class and phase of each; on how many ranks, and of which cores.
MODELS: Final = {
    "bert": (("bert", None, "forward"), 1, "v3"),
    "llama on two ranks": (("llama", "LlamaForCausalLM", "decode"), 2, "v2"),
}
PROGRAM: Final = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from nxpipe.emulator.compile import shard_graph
from nxpipe.emulator.compile import emit
from nxpipe.emulator.executable.executable import to_bytes
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.passes import PassOptions
graph = decode(sys.stdin.buffer.read())
program = shard_graph(graph, PassOptions(tensor_parallel=int(sys.argv[2])))
print(hashlib.sha256(to_bytes(emit(program, sys.argv[3]))).hexdigest())
"""


def _runs_emulator(python: str) -> bool:
    code = "import sys, numpy, ml_dtypes; sys.exit(sys.version_info < (3, 11))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


@cache
def here(model: str) -> str:
    asked, degree, core = MODELS[model]
    return hashlib.sha256(to_bytes(emit(compiled(wanted(*asked), degree=degree, core=core), core))).hexdigest()


def elsewhere(python: str, model: str, seed: str) -> str:
    asked, degree, core = MODELS[model]
    ran = subprocess.run(
        [python, "-c", PROGRAM, str(ROOT), str(degree), core],
        input=compiled(wanted(*asked), core=core).whole.to_bytes(),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
    )
    return ran.stdout.decode().strip()


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", ["0", "4294967295"])
@pytest.mark.parametrize("model", MODELS)
def test_another_process_makes_the_same_bytes(model: str, seed: str) -> None:
    assert elsewhere(sys.executable, model, seed) == here(model)


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", MODELS)
def test_every_python_of_this_machine_makes_the_same_bytes(model: str) -> None:
    emulators = list(filter(_runs_emulator, pythons()))
    digests = {python: elsewhere(python, model, "1") for python in emulators}
    assert digests == dict.fromkeys(emulators, here(model)) != {}
