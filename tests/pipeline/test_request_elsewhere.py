"""Equal builds elsewhere have equal keys: another checkout and environment."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.checkout import copy_packages
from tests.conftest import ROOT
from tests.pipeline.conftest import BERT, LLAMA, write_model

MODELS: dict[str, dict[str, object]] = {
    "encoder": {
        "path": "./models/encoder",
        "task": "fill-mask",
        "target": "inf2.xlarge",
        "buckets": [32, 64],
        "batches": [1, 2],
        "autocast": "all",
        "autocast_type": "fp16",
        "weights": "./models/encoder",
    },
    "decoder": {
        "path": "./models/decoder",
        "task": "text-generation",
        "target": "trn2.48xlarge",
        "tp": 4,
        "phases": ["prefill", "decode"],
        "weights": "random:7",
    },
}
LONG_AGO = 1_000_000_000


def project(folder: Path, *, backwards: bool = False) -> Path:
    """An nxpipe.toml beside two small models, one of which brings its weights."""

    def turned(items: dict[str, object]) -> dict[str, object]:
        return dict(reversed(items.items())) if backwards else dict(items)

    for name, config in (("encoder", BERT), ("decoder", LLAMA)):
        write_model(folder / "models" / name, turned(config))
    save_file({"a": np.arange(6, dtype=np.float32)}, folder / "models" / "encoder" / "model.safetensors")
    lines = ["# what is built"] if backwards else []
    for name in turned({"encoder": 1, "decoder": 2}):
        table = turned({"name": name, **MODELS[name]})
        lines += ["[[models]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    lines += ["[project]", 'name = "here"', "[store]", 'url = "file://store"']
    (folder / "nxpipe.toml").write_text("\n".join(lines))
    return folder


def keys(python: Path | str, checkout: Path, folder: Path, **environment: str) -> dict[str, str]:
    """The keys by model, computed by `nxpipe` of that checkout with that Python."""
    program = f"import sys; sys.path.insert(0, {str(checkout)!r}); from nxpipe.pipeline.cli.entry import main; main()"
    ran = subprocess.run(
        [str(python), "-c", program, "store", "explain", "--json"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return {entry["model"]: entry["request_key"] for entry in json.loads(ran.stdout)}


def copied_checkout(target: Path) -> Path:
    """The sources with other modes and times, as in another clone with another umask."""
    copy_packages(target)
    age(target)
    return target


def age(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
        os.utime(path, (LONG_AGO, LONG_AGO))


def another_environment(folder: Path) -> Path:
    """A virtual environment at another path, with the libraries of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (Path(packages) / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    found = keys(sys.executable, ROOT, project(tmp_path / "here"))
    assert set(found) == {"encoder", "decoder"}
    return found


def test_a_copied_checkout_in_another_environment_asks_for_the_same_keys(here: dict[str, str], tmp_path: Path) -> None:
    """At once: another path of checkout, environment and project, other times and modes, and tables turned around."""
    umask = os.umask(0o077)
    try:
        checkout = copied_checkout(tmp_path / "another clone")
        there = project(tmp_path / "elsewhere", backwards=True)
        age(there)
        python = another_environment(tmp_path / "venv")
        found = keys(python, checkout, there, PYTHONHASHSEED="7", TZ="Asia/Kathmandu", USER="somebody")
    finally:
        os.umask(umask)
    assert found == here


def test_a_checkout_with_another_compiler_asks_for_other_keys(here: dict[str, str], tmp_path: Path) -> None:
    """So the test above would notice: the copy's own sources are what counts."""
    checkout = copied_checkout(tmp_path / "another clone")
    with (checkout / "emulator" / "compile.py").open("a") as source:
        source.write("# changed\n")
    found = keys(sys.executable, checkout, project(tmp_path / "elsewhere"))
    assert set(found.values()).isdisjoint(here.values())
