"""Whether the machine has the devices that its instance type promises, and an artifact has programs for them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.util.errors import NotReady

if TYPE_CHECKING:
    from nxpipe.artifact_store.manifest import Manifest

_DEVICE: Final = re.compile("neuron[0-9]+")  # the driver makes one for each chip


def require_devices(instance_type: str, folder: Path) -> int:
    """The number of chips, all of which are there."""
    promised = _entry(instance_type).chips
    found = sum(_DEVICE.fullmatch(path.name) is not None for path in folder.iterdir())
    if found != promised:
        raise NotReady(
            f"{folder} has {found} Neuron devices, and a {instance_type} has {promised}; look at `dmesg` for the "
            "driver, and let Auto Scaling replace the instance"
        )
    return found


def require_programs_for(instance_type: str, manifest: "Manifest") -> None:
    entry = _entry(instance_type)
    if manifest.target != entry.compiler_target:
        raise NotReady(
            f"{manifest.name} has programs for {manifest.target}, and a {instance_type} runs those for "
            f"{entry.compiler_target}; build the model for this fleet and promote that"
        )
    degree = max((each.tensor_parallel for each in manifest.executables), default=1)
    if degree > entry.logical_cores:
        raise NotReady(
            f"{manifest.name} is spread over {degree} logical cores, and a {instance_type} has {entry.logical_cores}; "
            "build it with a smaller tp, or choose a larger instance type"
        )


def _entry(instance_type: str) -> Instance:
    if instance_type not in INSTANCES:
        raise NotReady(f"{instance_type} is no instance type with Neuron devices that this version of nxpipe knows")
    return INSTANCES[instance_type]
