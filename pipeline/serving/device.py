"""A served model on this machine's Neuron devices: its NEFFs in a process for each rank, loaded once."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.serving.model import ArtifactFolder, ServingModel
from nxpipe.pipeline.serving.programs import Session
from nxpipe.pipeline.util.errors import ProgramInvalid
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.verify.device import (
    DeviceOptions,
    described_device,
    device_faults,
    on_ranks,
    require_device_programs,
    require_libraries,
)

if TYPE_CHECKING:
    from nxpipe.emulator.numerics import Array

_HOST: Final = "nxpipe.emulator.run.devices.service:serve"


class DeviceSession:
    """Programs on the cores of a device."""

    def __init__(self, programs: Sequence[str], folder: Path, options: DeviceOptions, first_core: int = 0) -> None:
        from nxpipe.artifact_store.fetch.folder import WEIGHTS
        from nxpipe.emulator.run.devices.service import RankService

        files = {name: _files(folder, name) for name in programs}
        degree, physical_cores = _shape(files)
        argument = {"programs": files, "weights": str(folder / WEIGHTS)}

        def start(document: Any) -> None:
            on_ranks(_HOST, document, degree, physical_cores, options, first_core)

        with device_faults():
            self._ranks = RankService(degree, start, argument)

    def run(self, program: str, inputs: "Mapping[str, Array]") -> "dict[str, Array]":
        with device_faults():
            return self._ranks.run(program, inputs)

    def close(self) -> None:
        self._ranks.close()


def on_devices(folder: Path, options: DeviceOptions, step: Step) -> ServingModel:
    """The artifact of a fetched folder, on this machine's devices; NotReady if there are none of its target."""
    require_libraries()
    opened = ArtifactFolder.open(folder)
    require_device_programs(opened.manifest)
    with device_faults(), step("open the device"):
        described_device(opened.manifest, options)
    return ServingModel.of_manifest(opened.manifest, opened.read_blob, partial(_load, folder, options))


def _load(folder: Path, options: DeviceOptions, names: Sequence[str], copy: int) -> Session:
    degree, _ = _shape({name: _files(folder, name) for name in names})
    return DeviceSession(names, folder, options, copy * degree)


def _files(folder: Path, name: str) -> dict[str, str]:
    program = folder / "executables" / name
    return {"neff": f"{program}.neff", "interface": f"{program}.json"}


def _shape(files: Mapping[str, Mapping[str, str]]) -> tuple[int, int]:
    """The ranks of the programs, and the physical cores of each."""
    from nxpipe.emulator.errors import InterfaceInvalid, NeffInvalid
    from nxpipe.emulator.executable.interface import interface_from
    from nxpipe.emulator.executable.neff import open_neff

    try:
        shapes = {
            (interface_from(Path(own["interface"]).read_bytes()).degree, open_neff(Path(own["neff"])).physical_cores)
            for own in files.values()
        }
    except (InterfaceInvalid, NeffInvalid, OSError) as fault:
        raise ProgramInvalid(f"a program cannot be read ({fault}); fetch the artifact again") from fault
    if len(shapes) != 1:
        raise ProgramInvalid(f"programs of different ranks cannot be loaded together: {sorted(shapes)}")
    return shapes.pop()
