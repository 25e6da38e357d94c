"""`nxpipe rollout approve`, `pause`, `resume` and `abort`: the signals of an operator."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.completion import complete_fleets
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from nxpipe.pipeline.rollout.aws import SignalResult

_fleet = click.argument("fleet", shell_complete=complete_fleets)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def approve(console: Console, fleet: str, config_path: Path) -> None:
    """Advance a rollout whose step ended undecided.

    Applies to the current step only, and only if its evidence is inconclusive: approval never overrides evidence that
    the new version is worse.

    \b
    Example:
      nxpipe rollout approve search
    """
    from nxpipe.pipeline.rollout.aws import approve

    _send(console, fleet, config_path, approve)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def pause(console: Console, fleet: str, config_path: Path) -> None:
    """Pause a rollout at its current step.

    Evidence is collected as before, and a regression still rolls back.

    \b
    Example:
      nxpipe rollout pause search
    """
    from nxpipe.pipeline.rollout.aws import pause

    _send(console, fleet, config_path, pause)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def resume(console: Console, fleet: str, config_path: Path) -> None:
    """Resume a paused rollout.

    \b
    Example:
      nxpipe rollout resume search
    """
    from nxpipe.pipeline.rollout.aws import resume

    _send(console, fleet, config_path, resume)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def abort(console: Console, fleet: str, config_path: Path) -> None:
    """Abort a rollout: all traffic returns to the old version.

    \b
    Example:
      nxpipe rollout abort search
    """
    from nxpipe.pipeline.rollout.aws import abort

    _send(console, fleet, config_path, abort)


def _send(console: Console, fleet: str, config_path: Path, signal: "Callable[..., SignalResult]") -> None:
    import os

    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.rollout.aws import StateMachine
    from nxpipe.pipeline.rollout.context import fleet_with_rollouts

    config = load_config(config_path, os.environ)
    result = signal(StateMachine(config, fleet_with_rollouts(config, fleet)))
    if console.json:
        console.data({"execution": result.execution, "signal": result.signal, "changed": result.changed})
    else:
        console.result(result.sentence)
