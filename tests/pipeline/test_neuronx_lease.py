"""Builders in two processes that need the NEFF of the same module at once: neuronx-cc may take minutes for it."""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.emulator.executable.interface import Argument, Interface, Result
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.pipeline.build.cache import hold_lease
from nxpipe.pipeline.compile.neuronx.backend import NeuronxBackend
from nxpipe.pipeline.compile.neuronx.toolchain import Compilation
from tests.conftest import ROOT
from tests.hlo.modules import good
from tests.neuronx.installed import InstalledCompiler, compiler

pytestmark = pytest.mark.sample(6, "two builders of one module")

__all__ = ["compiler"]

TENSOR = TensorType((8, 16), DType.FLOAT32)
INTERFACE = Interface(
    1, tuple(Argument(name, Role.INPUT, TENSOR, TENSOR) for name in "qkv"), (Result("context", TENSOR),)
)
MODULE = "attention"


def compile_module(url: str, name: str, *, force: bool = False) -> str:
    """The digest of the module's NEFF, for a program of this name."""
    store, compilation = open_store(url), Compilation("trn2", release="2.27.1")
    backend = NeuronxBackend(partial(hold_lease, store, log=partial(print, flush=True)))
    return backend.neff(name, INTERFACE, good(MODULE), compilation, store, force=force).sha256


class Builder:
    """A process that compiles the module into the store."""

    def __init__(self, url: str, name: str) -> None:
        code = f"from {__name__} import compile_module; print(compile_module({url!r}, {name!r}))"
        self.process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends(self) -> str:
        assert self.process.stdout is not None
        said = self.process.stdout.read().strip()
        assert self.process.wait() == 0
        return said


def first_builder(url: str, compiler: InstalledCompiler) -> Builder:
    """A builder whose compiler is at work, and stays so until its gate opens."""
    builder = Builder(url, "first")
    while not compiler.calls:
        assert builder.process.poll() is None
        time.sleep(0.02)
    return builder


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def test_the_second_builder_of_a_module_waits_and_finds_the_neff_of_the_first(
    url: str, compiler: InstalledCompiler
) -> None:
    gate = compiler.close()
    first, second = first_builder(url, compiler), Builder(url, "second")
    assert f":{first.process.pid}, which has held the lease since" in second.says()
    gate.touch()
    assert first.ends() == second.ends() == compile_module(url, "third")
    assert len(compiler.calls) == 1


def test_the_second_builder_compiles_if_the_first_is_killed(url: str, compiler: InstalledCompiler) -> None:
    gate = compiler.close()
    first, second = first_builder(url, compiler), Builder(url, "second")
    assert "waiting for" in second.says()
    first.process.kill()
    first.process.wait()
    gate.touch()
    assert second.ends() == compile_module(url, "third")
    assert len(compiler.calls) == 2


def test_a_forced_compilation_waits_for_nobody(url: str, compiler: InstalledCompiler) -> None:
    gate = compiler.close()
    first = first_builder(url, compiler)
    gate.touch()
    kept = compile_module(url, "forced", force=True)
    assert first.ends() == kept  # whoever stored it first
    assert len(compiler.calls) == 2
