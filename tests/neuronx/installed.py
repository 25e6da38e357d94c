"""The stand-in for neuronx-cc, installed on the PATH of a test, with a record of its calls."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.neuronx.stand_in import FAILURE

_CALLS = "NEURONX_CC_CALLS"
_GATE = "NEURONX_CC_GATE"
_PROGRAM = f"""#!{sys.executable}
import json, os, sys, time
sys.path.insert(0, {json.dumps(str(ROOT))})
from tests.neuronx.stand_in import main
if sys.argv[1] == "compile":
    with open(os.environ[{_CALLS!r}], "a") as calls:
        calls.write(json.dumps(sys.argv[2:]) + "\\n")
    while not os.path.exists(os.environ.get({_GATE!r}, "/")):
        time.sleep(0.02)
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class InstalledCompiler:
    """The folder of the program, and what a test asks of it."""

    folder: Path
    record: Path
    monkeypatch: pytest.MonkeyPatch

    def fail(self, failure: str) -> None:
        """Play a failure of `tests.neuronx.stand_in`; none for an empty text."""
        self.monkeypatch.setenv(FAILURE, failure)

    def close(self) -> Path:
        """Each compilation waits, once its call is recorded, until somebody creates this file."""
        gate = self.folder / "gate"
        self.monkeypatch.setenv(_GATE, str(gate))
        return gate

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each compilation."""
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    def remove(self) -> None:
        self.monkeypatch.setenv("PATH", "/usr/bin:/bin")

    def replace(self, script: str) -> None:
        """Another program in its place, in the language of the shell."""
        write(self.folder / "neuronx-cc", f"#!/bin/sh\n{script}\n")


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstalledCompiler:
    made = InstalledCompiler(tmp_path / "neuron" / "bin", tmp_path / "neuron" / "calls", monkeypatch)
    made.folder.mkdir(parents=True)
    made.record.touch()
    write(made.folder / "neuronx-cc", _PROGRAM)
    monkeypatch.setenv("PATH", str(made.folder), prepend=":")
    monkeypatch.setenv(_CALLS, str(made.record))
    for name in (FAILURE, "NEURON_CC_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return made
