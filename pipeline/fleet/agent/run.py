"""From a new instance to a serving one: check the devices, fetch the artifact, start the server.

The artifact is that of the environment's channel, else of the fleet's. It is fetched with the trust rules of [signing],
and each byte is verified against its digest.
"""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.fleet.agent.instance import FleetInstance
from nxpipe.pipeline.util.errors import NotReady

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.fetch.selection import Wanted
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier


def fetch_artifact(store: "Store", model: ServedModel, trust: "ChannelVerifier", folder: Path) -> "Manifest":
    """Fetches the artifact into the folder and verifies every byte against its digest."""
    from nxpipe.artifact_store.fetch.folder import fetch

    selected = _resolve(store, model, trust)
    fetch(store.blobs, selected.manifest, folder)
    return selected.manifest


def _resolve(store: "Store", model: ServedModel, trust: "ChannelVerifier") -> "Wanted":
    """The artifact of the first channel that is not empty. An unreadable or untrusted channel is an error."""
    from nxpipe.artifact_store.fetch.selection import by_channel

    *preferred, last = model.channels
    for channel in preferred:
        with suppress(ChannelEmpty):
            return by_channel(store, channel, model.model_id, model.target, trust)
    return by_channel(store, last, model.model_id, model.target, trust)


_DEVICE: Final = re.compile("neuron[0-9]+")  # the driver creates one per chip


def require_devices(instance_type: str, folder: Path) -> int:
    """The number of chips; an error if some of the instance type's are missing."""
    expected = _entry(instance_type).chips
    found = sum(_DEVICE.fullmatch(path.name) is not None for path in folder.iterdir())
    if found != expected:
        raise NotReady(
            f"{folder} has {found} Neuron devices, but a {instance_type} has {expected}; check the driver with `dmesg` "
            "or let Auto Scaling replace the instance"
        )
    return found


def require_programs_for(instance_type: str, manifest: "Manifest") -> None:
    entry = _entry(instance_type)
    if manifest.target != entry.compiler_target:
        raise NotReady(
            f"{manifest.name} has programs for {manifest.target}, but a {instance_type} runs those for "
            f"{entry.compiler_target}; build the model for this fleet and promote that artifact"
        )
    degree = max((each.tensor_parallel for each in manifest.executables), default=1)
    if degree > entry.logical_cores:
        raise NotReady(
            f"{manifest.name} needs {degree} logical cores, but a {instance_type} has {entry.logical_cores}; "
            "build it with a smaller tp, or choose a larger instance type"
        )


def _entry(instance_type: str) -> Instance:
    if instance_type not in INSTANCES:
        raise NotReady(f"{instance_type} is not an instance type with Neuron devices that this version of nxpipe knows")
    return INSTANCES[instance_type]


ARTIFACT: Final = "NXPIPE_ARTIFACT"  # environment variable of the server: the artifact's folder

Step: TypeAlias = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Agent:
    store: "Store"
    model: ServedModel
    trust: "ChannelVerifier"
    folder: Path
    devices: Path
    command: tuple[str, ...]

    def prepare(self, instance: FleetInstance, step: Step) -> None:
        if self.command and shutil.which(self.command[0]) is None:
            raise NotReady(f"there is no program {self.command[0]!r} on this instance; install it in the AMI")
        with step(f"check the devices of a {instance.type}"):
            require_devices(instance.type, self.devices)
        with step(f"fetch {self.model.model_id} from channel {' or '.join(self.model.channels)}"):
            manifest = fetch_artifact(self.store, self.model, self.trust, self.folder)
        require_programs_for(instance.type, manifest)

    def serve(self) -> NoReturn:
        """Replaces this process by the server, which so receives the supervisor's signals."""
        os.execvpe(self.command[0], self.command, {**os.environ, ARTIFACT: str(self.folder)})  # noqa: S606, as asked
