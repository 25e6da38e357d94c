"""Options of rollout commands, and what they select: a plan, or one fleet with its state machine and channels."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.pipeline.canary.plan import CanaryPlan
    from nxpipe.pipeline.rollout.context import RolloutContext


_RATE: Final = click.FloatRange(0, 1, max_open=True)

rps_option = click.option(
    "--rps",
    type=click.FloatRange(0, 1e5, min_open=True),
    required=True,
    help="Requests a second, of both versions together.",
)
base_error_option = click.option(
    "--base-error", type=_RATE, required=True, help="The share of requests that the old version fails."
)
canary_error_option = click.option(
    "--canary-error", type=_RATE, help="The share that the new version fails.  [default: that of the old one]"
)
latency_scale_option = click.option(
    "--latency-scale",
    type=click.FloatRange(0.1, 10),
    default=1.0,
    show_default=True,
    help="By what the new version multiplies every latency.",
)
latency_tail_option = click.option(
    "--latency-tail",
    type=click.FloatRange(1, 10),
    default=1.0,
    show_default=True,
    help="By what it multiplies p99, stretching latencies above p95 alone.",
)


def configured_plan(config_path: Path) -> "CanaryPlan":
    """By [rollout] of the configuration, or by its defaults where there is none."""
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.rollout.input import plan_of

    return plan_of(load_config(config_path, os.environ, missing_ok=True).rollout)


def open_context(
    console: Console, fleet: str, store: str | None, config_path: Path, *, actor: str = "", key: str | None = None
) -> "RolloutContext":
    """The fleet that a command names, with its state machine and its channels."""
    from nxpipe.artifact_store import Store
    from nxpipe.pipeline.cli.fleets import serving_fleet
    from nxpipe.pipeline.cli.store_url import open_the_store
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.rollout.aws import StateMachine
    from nxpipe.pipeline.rollout.context import FleetArtifacts, RolloutContext

    config = load_config(config_path, os.environ)
    served = serving_fleet(config, fleet, "FLEET")
    itself = Store(open_the_store(store, config_path, console).backend)
    artifacts = FleetArtifacts(itself, config, config_path.parent, served, actor, key)
    return RolloutContext(config, served, StateMachine(config, served), artifacts)


def serving_fleet_names(config_path: Path) -> list[str]:
    from nxpipe.pipeline.artifacts.channels import serving_fleets
    from nxpipe.pipeline.config import load_config

    return list(serving_fleets(load_config(config_path, os.environ)))
