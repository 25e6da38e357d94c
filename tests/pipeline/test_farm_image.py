"""The container of a build farm: what can be known of its Dockerfile without building it."""

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.conftest import ROOT

DOCKERFILE = ROOT / "pipeline" / "templates" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Each instruction with its text, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, text) for name, _, text in (line.partition(" ") for line in joined.splitlines())]


def texts(name: str) -> list[str]:
    return [text for instruction, text in instructions() if instruction == name]


def test_only_known_instructions_are_used_and_one_image_is_built() -> None:
    names = {name for name, _ in instructions()}
    assert names == {"ARG", "FROM", "SHELL", "ENV", "RUN", "COPY", "USER", "WORKDIR", "CMD"}
    assert texts("FROM") == ["--platform=linux/amd64 ${PYTHON_IMAGE}"]


def test_every_argument_is_used_and_every_variable_is_an_argument() -> None:
    arguments = {text.partition("=")[0] for text in texts("ARG")}
    others = " ".join(text for name, text in instructions() if name != "ARG")
    assert set(re.findall(r"\$\{(\w+)", others)) == arguments


def test_what_must_be_given_has_no_default_and_no_index_is_named() -> None:
    assert [text for text in texts("ARG") if "=" in text] == [f"TORCH={release_of_torch()}"]
    assert "://" not in DOCKERFILE.read_text()


def release_of_torch() -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (pin,) = [need for need in extras["compile"] if need.startswith("torch==")]
    return str(pin.removeprefix("torch=="))


def test_packages_are_installed_by_exact_release_or_digest_and_jobs_run_without_privileges() -> None:
    installed = re.findall(r"pip install(?: --[a-z-]+ \S+)* \"([^\"]+)\"", " ".join(texts("RUN")))
    assert installed == [
        "neuronx-cc==${NEURONX_CC:?}",
        "torch==${TORCH}",
        "/tmp/wheels/${NXPIPE_WHEEL}[compile,neuron,onnx]",
    ]
    assert any("sha256sum --check" in text for text in texts("RUN"))
    assert texts("USER") == ["builder"]


@pytest.mark.parametrize("number", range(4))
def test_the_shell_commands_have_no_finding_of_shellcheck(number: int, tmp_path: Path) -> None:
    assert len(texts("RUN")) == 4
    script = tmp_path / "run.sh"
    given = "".join(f"{text.partition('=')[0]}=x\nexport {text.partition('=')[0]}\n" for text in texts("ARG"))
    script.write_text(f"#!/bin/sh\nset -eu\n{given}{texts('RUN')[number]}\n")
    shellcheck = Path(sysconfig.get_path("scripts"), "shellcheck")
    found = subprocess.run([shellcheck, script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
