"""From a fresh instance to a serving one: the devices, the artifact, the server; in this order."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias

from nxpipe.pipeline.artifacts.channels import ServedModel
from nxpipe.pipeline.fleet.agent.artifact import fetch_artifact
from nxpipe.pipeline.fleet.agent.devices import require_devices, require_programs_for
from nxpipe.pipeline.fleet.agent.instance import Instance
from nxpipe.pipeline.util.errors import NotReady

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.transfer.believed import Trust

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

    def prepare(self, instance: Instance, step: Step) -> None:
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
