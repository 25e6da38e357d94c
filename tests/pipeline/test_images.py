"""The containers of the build farm and of proofs: what can be known of their Dockerfiles without building them."""

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

FARM, PROVER = (ROOT / "pipeline" / "templates" / name for name in ("Dockerfile", "Dockerfile.prove"))
BOTH = pytest.mark.parametrize("file", [FARM, PROVER], ids=["farm", "prover"])
_INSTALL = r"pip install(?: --[a-z-]+ \S+)* \"([^\"]+)\""


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each instruction with its text, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, text) for name, _, text in (line.partition(" ") for line in joined.splitlines())]


def texts(file: Path, name: str) -> list[str]:
    return [text for instruction, text in instructions(file) if instruction == name]


def shell(file: Path) -> str:
    return " ".join(texts(file, "RUN"))


@BOTH
def test_only_known_instructions_are_used_and_one_image_is_built(file: Path) -> None:
    names = {name for name, _ in instructions(file)}
    assert names == {"ARG", "FROM", "SHELL", "ENV", "RUN", "COPY", "USER", "WORKDIR", "CMD"}
    assert texts(file, "FROM") == ["--platform=linux/amd64 ${PYTHON_IMAGE}"]


@BOTH
def test_every_argument_is_used_and_every_variable_is_an_argument(file: Path) -> None:
    arguments = {text.partition("=")[0] for text in texts(file, "ARG")}
    others = " ".join(text for name, text in instructions(file) if name != "ARG")
    assert set(re.findall(r"\$\{(\w+)", others)) == arguments


def test_what_must_be_given_has_no_default_and_no_index_is_named() -> None:
    assert [text for text in texts(FARM, "ARG") if "=" in text] == [f"TORCH={release_of_torch()}"]
    assert [text for text in texts(PROVER, "ARG") if "=" in text] == []
    assert not any("://" in file.read_text() for file in (FARM, PROVER))


def release_of_torch() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [need for need in extras["compile"] if need.startswith("torch==")]
    return str(pin.removeprefix("torch=="))


def test_packages_are_installed_by_exact_release_or_digest_and_jobs_run_without_privileges() -> None:
    assert re.findall(_INSTALL, shell(FARM)) == [
        "neuronx-cc==${NEURONX_CC:?}",
        "torch==${TORCH}",
        "/tmp/wheels/${NXPIPE_WHEEL}[compile,neuron,onnx]",
    ]
    assert re.findall(_INSTALL, shell(PROVER)) == ["/tmp/wheels/${NXPIPE_WHEEL}[devices]", "nrtpy==${NRTPY:?}"]
    system = re.findall(r'"(aws-[a-z-]+)=(\$\{\w+:\?\})"', shell(PROVER))
    assert system == [("aws-neuronx-runtime-lib", "${RUNTIME_LIB:?}"), ("aws-neuronx-collectives", "${COLLECTIVES:?}")]
    assert all("sha256sum --check" in shell(file) for file in (FARM, PROVER))
    assert [texts(file, "USER") for file in (FARM, PROVER)] == [["builder"], ["prover"]]


def test_a_prover_has_neither_a_compiler_nor_a_framework() -> None:
    assert not re.search(r"torch|jax|transformers|neuronx-cc|compile", shell(PROVER))


@BOTH
@pytest.mark.parametrize("number", range(4))
def test_the_shell_commands_have_no_finding_of_shellcheck(file: Path, number: int, tmp_path: Path) -> None:
    assert len(texts(file, "RUN")) == 4
    script = tmp_path / "run.sh"
    given = "".join(f"{text.partition('=')[0]}=x\nexport {text.partition('=')[0]}\n" for text in texts(file, "ARG"))
    script.write_text(f"#!/bin/sh\nset -eu\n{given}{texts(file, 'RUN')[number]}\n")
    shellcheck = Path(sysconfig.get_path("scripts"), "shellcheck")
    found = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
