"""From a command's words to one fleet's machine and channels."""

import os
from dataclasses import dataclass
from pathlib import Path

from nxpipe.artifact_store import Store
from nxpipe.pipeline.artifacts.store_url import open_configured_store
from nxpipe.pipeline.config import Config, ServingFleet, load_config
from nxpipe.pipeline.config.fleets import serving_fleet, serving_fleets
from nxpipe.pipeline.rollout.artifacts import Artifacts
from nxpipe.pipeline.rollout.machine import Machine
from nxpipe.pipeline.rollout.status import Watcher
from nxpipe.pipeline.util.console import Console


@dataclass(frozen=True)
class Opened:
    """One fleet; `artifacts` is asked to move channels, and otherwise only read."""

    config: Config
    fleet: ServingFleet
    machine: Machine
    artifacts: Artifacts

    @property
    def watcher(self) -> Watcher:
        return Watcher(self.machine, self.artifacts.store)


def opened(
    console: Console, fleet: str, store: str | None, config_path: Path, *, actor: str = "", key: str | None = None
) -> Opened:
    config = load_config(config_path, os.environ)
    served = serving_fleet(config, fleet, "FLEET")
    itself = Store(open_configured_store(store, config_path, console).backend)
    artifacts = Artifacts(itself, config, config_path.parent, served, actor, key)
    return Opened(config, served, Machine(config, served), artifacts)


def fleets_of(config_path: Path) -> list[str]:
    return list(serving_fleets(load_config(config_path, os.environ)))
