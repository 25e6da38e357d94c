"""Artifacts with programs for devices, and a machine with a stand-in device that computes them by XLA on the CPU."""

import argparse
import sys
from pathlib import Path

import pytest

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.manifest import DeviceProgram, Executable, Manifest
from nxpipe.emulator.hlo.canonical import canonical
from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.hlo.xla import proto_of
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from tests.neuronx.stand_in import compiled, parser
from tests.runtime.devices import library as stand_in_library

NRTPY = Path(stand_in_library.__file__).with_name("xla_nrtpy.py")


def for_devices(store: Store, published: Published, folder: Path, *, drops_unused: bool = False) -> Published:
    """The artifact of the emulator's backend again, with a NEFF for each program, and with its evidence."""
    manifest = published.manifest
    graphs = {file.path: decode(store.read_blob(file.blob)) for file in manifest.files if "graphs/" in file.path}
    executables = tuple(
        executable.model_copy(
            update={"device": _device_program(store, executable, graphs, manifest.target, folder, drops_unused)}
        )
        for executable in manifest.executables
    )
    inputs = canonical_json({**store.key_inputs(manifest), "for": "devices"})
    fields = {"backend": "neuronx", "executables": executables, "key_inputs": store.put_blob(inputs)}
    made = manifest.model_copy(update=fields)
    for evidence in store.evidence(manifest.digest):
        store.attest(evidence.model_copy(update={"manifest": made.digest}))
    return store.publish(Manifest.from_bytes(made.to_bytes()))


def _device_program(
    store: Store, executable: Executable, graphs: dict[str, Graph], target: str, folder: Path, drops_unused: bool
) -> DeviceProgram:
    module = module_of(graphs[f"graphs/{executable.name}"], executable.tensor_parallel)
    names = [result.name for result in module.interface.results]
    proto = canonical(proto_of(module.text), output_names=names)
    return DeviceProgram(
        neff=store.put_blob(neff_of(proto, target, folder, drops_unused=drops_unused)),
        module=store.put_blob(proto),
        interface=store.put_blob(module.interface.to_bytes()),
    )


def neff_of(proto: bytes, target: str, folder: Path, *, drops_unused: bool = False) -> bytes:
    """The NEFF of the stand-in compiler."""
    path = folder / "module.hlo"
    path.write_bytes(proto)
    words = ["compile", str(path), "--framework", "XLA", "--target", target, "--output", "program.neff"]
    options: argparse.Namespace = parser().parse_args(words)
    return compiled(options, drops_unused=drops_unused)


def install_device(library: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """Make this machine one with the stand-in device: two cores of inf2, unless the settings say otherwise.

    Settings in small letters are those of the stand-ins, such as `defect="zeros"`."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "nrtpy.py").unlink(missing_ok=True)
    (site / "nrtpy.py").symlink_to(NRTPY)
    copy = stand_in_library.copied(library, folder / "libnrt")
    own = {"family": "inf2", "hbm": 1 << 28, "library": copy, **settings}
    for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(f"STANDIN_{name.upper()}", str(value))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(copy.parent))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "nrtpy", raising=False)
