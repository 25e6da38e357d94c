"""The import contracts of pyproject.toml hold, and each catches a new breach."""

import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from tests.checkout import copy_packages
from tests.conftest import ROOT


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the packages to break."""
    copy_packages(tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_import_contracts_hold() -> None:
    answer = lint(ROOT)
    assert answer.returncode == 0, answer.stdout


BREACHES = [
    ("emulator/ir/graph.py", "import boto3"),
    ("emulator/run/fast.py", "import torch"),
    ("emulator/passes/__init__.py", "import transformers"),
    ("emulator/capture/importer.py", "import onnx"),
    ("emulator/hlo/module.py", "import jaxlib"),
    ("emulator/errors.py", "import pydantic"),
    ("emulator/run/devices/session.py", "import nrtpy"),
    ("emulator/hardware/__init__.py", "import click"),
    ("emulator/hardware/__init__.py", "import nxpipe.pipeline.util.errors"),
    ("emulator/ir/graph.py", "import nxpipe.artifact_store"),
    ("artifact_store/manifest.py", "import nxpipe.emulator.ir.graph"),
    ("artifact_store/manifest.py", "import torch"),
    ("artifact_store/backends/local.py", "import boto3"),
    ("artifact_store/store.py", "import cryptography"),
    ("pipeline/util/console.py", "import nxpipe.stacks"),
    ("pipeline/build/run.py", "import torch"),
    ("pipeline/build/run.py", "import click"),
    ("pipeline/config/root.py", "import click"),
    ("pipeline/util/files.py", "import nxpipe.pipeline.config"),
    ("pipeline/canary/plan.py", "import nxpipe.pipeline.rollout.planner"),
    ("pipeline/fleet/infrastructure.py", "import nxpipe.pipeline.rollout.planner"),
    ("pipeline/release/state.py", "import nxpipe.pipeline.cli.release"),
    ("stacks/storage.py", "import nxpipe.artifact_store"),
    ("stacks/storage.py", "import nxpipe.emulator.ir.graph"),
    ("stacks/storage.py", "import nxpipe.pipeline.cli"),
    ("stacks/storage.py", "import nxpipe.pipeline.util.exit_codes"),
]


def test_every_forbidden_import_is_caught(copy: Path) -> None:
    """All breaches in one copy: the report names the importing module and the imported one."""
    for file, line in BREACHES:
        path = copy / file
        path.write_text(f"{path.read_text()}\n{line}  # noqa\n")
    answer = lint(copy)
    assert answer.returncode == 1, answer.stdout
    assert "BROKEN" in answer.stdout
    report = " ".join(answer.stdout.split())  # long lines are wrapped
    assert [breach for breach in BREACHES if _reported(*breach) not in report] == [], answer.stdout


def _reported(file: str, line: str) -> str:
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"nxpipe.{module} -> {line.removeprefix('import ')} (l."


ALLOWED_OUTSIDE = {
    "emulator": {"jaxlib", "numpy", "ml_dtypes", "onnx", "torch", "transformers"},
    "artifact_store": {"pydantic", "pydantic_core", "boto3", "botocore", "cryptography"},
    "stacks": {"aws_cdk", "cdk_nag", "constructs", "jsii"},
}


@pytest.mark.parametrize("package", ALLOWED_OUTSIDE)
def test_a_package_uses_no_library_that_the_design_does_not_give_it(package: str) -> None:
    graph = grimp.build_graph("nxpipe", include_external_packages=True)
    modules = graph.find_descendants(f"nxpipe.{package}")
    assert modules
    outside = {
        imported
        for module in modules
        for imported in graph.find_modules_directly_imported_by(module)
        if imported.partition(".")[0] not in {"nxpipe", *sys.stdlib_module_names}
    }
    assert outside <= ALLOWED_OUTSIDE[package]


def test_the_judge_of_rollouts_needs_the_standard_library_alone() -> None:
    """Its files are shipped as they are, as a function of AWS Lambda."""
    graph = grimp.build_graph("nxpipe", include_external_packages=True)
    judge = {"nxpipe.pipeline.canary", *graph.find_descendants("nxpipe.pipeline.canary")}
    imported = {name for module in judge for name in graph.find_modules_directly_imported_by(module)}
    assert {name for name in imported - judge if name.partition(".")[0] not in sys.stdlib_module_names} == set()


LIGHT = {
    "nxpipe.pipeline.cli.main": ("torch", "transformers", "boto3", "numpy", "pydantic"),
    "nxpipe.artifact_store": ("torch", "transformers", "boto3", "numpy", "cryptography"),
    "nxpipe.artifact_store.channel.change": ("torch", "transformers", "boto3", "numpy", "cryptography"),
    "nxpipe.emulator.hardware": ("torch", "transformers", "boto3", "numpy", "pydantic"),
    "nxpipe.pipeline.build.run": ("torch", "transformers", "boto3", "numpy"),
    "nxpipe.pipeline.canary.handler": ("boto3", "click", "numpy", "pydantic"),
    "nxpipe.pipeline.cli.rollout.group": ("torch", "transformers", "boto3", "numpy", "pydantic"),
    "nxpipe.pipeline.cli.infra.group": ("torch", "transformers", "boto3", "numpy", "pydantic", "nxpipe.stacks"),
    "nxpipe.pipeline.cli.infra.templates": ("torch", "transformers", "boto3", "numpy", "aws_cdk"),
    "nxpipe.stacks.lint.finding": ("torch", "transformers", "boto3", "numpy", "aws_cdk"),
    "nxpipe.pipeline.config.load": ("torch", "transformers", "boto3", "numpy"),
    "nxpipe.pipeline.config.reference": ("torch", "transformers", "boto3", "numpy"),
    "nxpipe.pipeline.config.store": ("torch", "transformers", "boto3", "numpy", "nxpipe.emulator"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_imports_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {LIGHT[module]} if name in sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""
