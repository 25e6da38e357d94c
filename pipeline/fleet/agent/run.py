"""What a fleet is to serve: its channel's artifact, of its model, believed by the rules of [signing], in a folder."""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from nxpipe.artifact_store.errors import ChannelEmpty
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.fleet.agent.instance import FleetInstance
from nxpipe.pipeline.util.errors import NotReady

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.artifact_store.transfer.believed import Trust
    from nxpipe.artifact_store.transfer.wanted import Wanted


def fetch_artifact(store: "Store", wish: ServedModel, trust: "Trust", folder: Path) -> "Manifest":
    """The folder holds the artifact in the end, each byte of it read against its digest."""
    from nxpipe.artifact_store.transfer.fetch import fetch

    wanted = _resolve(store, wish, trust)
    fetch(store.blobs, wanted.manifest, folder)
    return wanted.manifest


def _resolve(store: "Store", wish: ServedModel, trust: "Trust") -> "Wanted":
    """By the first channel that is not empty. One that cannot be read or believed is not passed over."""
    from nxpipe.artifact_store.transfer.wanted import by_channel

    *preferred, last = wish.channels
    for channel in preferred:
        with suppress(ChannelEmpty):
            return by_channel(store, channel, wish.model_id, wish.target, trust)
    return by_channel(store, last, wish.model_id, wish.target, trust)


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


def _entry(instance_type: str) -> FleetInstance:
    if instance_type not in INSTANCES:
        raise NotReady(f"{instance_type} is no instance type with Neuron devices that this version of nxpipe knows")
    return INSTANCES[instance_type]


ARTIFACT: Final = "NXPIPE_ARTIFACT"  # the server finds the folder under this name

Step: TypeAlias = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Agent:
    store: "Store"
    wish: ServedModel
    trust: "Trust"
    folder: Path
    devices: Path
    command: tuple[str, ...]

    def prepare(self, instance: FleetInstance, step: Step) -> None:
        if self.command and shutil.which(self.command[0]) is None:
            raise NotReady(f"there is no program {self.command[0]!r} to serve with; install it in the AMI")
        with step(f"count the devices of a {instance.type}"):
            require_devices(instance.type, self.devices)
        with step(f"fetch what channel {' or '.join(self.wish.channels)} serves of {self.wish.model_id}"):
            manifest = fetch_artifact(self.store, self.wish, self.trust, self.folder)
        require_programs_for(instance.type, manifest)

    def serve(self) -> NoReturn:
        """The server takes this process over, and so the supervisor's signals and its account."""
        os.execvpe(self.command[0], self.command, {**os.environ, ARTIFACT: str(self.folder)})  # noqa: S606, as asked
