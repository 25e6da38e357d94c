"""The fleet that a rollout command names: its configuration, state machine and channels."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.context import RolloutContext


def open_context(
    console: Console, fleet: str, store: str | None, config_path: Path, *, actor: str = "", key: str | None = None
) -> "RolloutContext":
    """The fleet that a command names, with its state machine and its channels."""
    from nxpipe.artifact_store import Store
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.fleets import serving_fleet
    from nxpipe.pipeline.rollout.aws import StateMachine
    from nxpipe.pipeline.rollout.context import FleetArtifacts, RolloutContext

    config = load_config(config_path, os.environ)
    served = serving_fleet(config, fleet, "FLEET")
    itself = Store(open_configured_store(store, config_path, console).backend)
    artifacts = FleetArtifacts(itself, config, config_path.parent, served, actor, key)
    return RolloutContext(config, served, StateMachine(config, served), artifacts)


def serving_fleet_names(config_path: Path) -> list[str]:
    from nxpipe.pipeline.artifacts.channels import serving_fleets
    from nxpipe.pipeline.config import load_config

    return list(serving_fleets(load_config(config_path, os.environ)))
