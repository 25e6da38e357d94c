"""Artifacts with programs for devices, and a machine with a stand-in device that computes them by XLA on the CPU."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from nxpipe.artifact_store import Published, open_store
from tests.neuronx.stand_in import FAILURE, install
from tests.pipeline.conftest import write_model
from tests.pipeline.test_build import built
from tests.runtime.devices import library as stand_in_library

_NRTPY: Final = Path(stand_in_library.__file__).with_name("xla_nrtpy.py")


def build_for_devices(
    folder: Path, config: Mapping[str, object], *options: str, drops_unused: bool = False
) -> Published:
    """A model, built by `nxpipe build --backend neuronx` and the stand-in compiler into the store of a folder.

    With `drops_unused`, NEFFs lack the inputs that nothing reads, as the compiler may leave them out."""
    model = folder / "model"
    if not model.exists():
        write_model(model, dict(config))
    (folder / "bin").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(install(folder / "bin").parent), prepend=":")
        patch.setenv(FAILURE, "drop-unused" if drops_unused else "")
        found = built(folder, model, "--backend", "neuronx", *options)
    return open_store(str(folder / "store")).resolve(str(found["request_key"]))


def install_device(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Make this machine one with the stand-in device: two cores of inf2, unless the settings say otherwise.

    Settings are those of the stand-ins, such as `defect="zeros"`."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "nrtpy.py").unlink(missing_ok=True)
    (site / "nrtpy.py").symlink_to(_NRTPY)
    copy = stand_in_library.copied(library, folder / "libnrt")
    own = {"family": "inf2", "hbm": 1 << 28, "library": copy, **settings}
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(f"STANDIN_{name.upper()}", str(value))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(copy.parent))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "nrtpy", raising=False)
