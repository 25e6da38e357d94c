"""`nxpipe rollout approve`, `pause`, `resume` and `abort`: what a person tells a rollout."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.signals import Answer

_fleet = click.argument("fleet")


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def approve(console: Console, fleet: str, config_path: Path) -> None:
    """Let a rollout go on whose evidence decides nothing.

    Only a step that is undecided goes on by it: against evidence that the new version is worse nobody's word counts.
    It holds for the step that is under way, and no longer.

    \b
    Example:
      nxpipe rollout approve search
    """
    from nxpipe.pipeline.rollout.signals import approve

    _tell(console, fleet, config_path, approve)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def pause(console: Console, fleet: str, config_path: Path) -> None:
    """Keep a rollout at the step where it is.

    Evidence is collected as before, and sends the new version back as before.

    \b
    Example:
      nxpipe rollout pause search
    """
    from nxpipe.pipeline.rollout.signals import pause

    _tell(console, fleet, config_path, pause)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def resume(console: Console, fleet: str, config_path: Path) -> None:
    """Let a paused rollout go on.

    \b
    Example:
      nxpipe rollout resume search
    """
    from nxpipe.pipeline.rollout.signals import resume

    _tell(console, fleet, config_path, resume)


@click.command(cls=Command)
@_fleet
@config_option
@click.pass_obj
def abort(console: Console, fleet: str, config_path: Path) -> None:
    """End a rollout: all traffic goes back to the old version.

    \b
    Example:
      nxpipe rollout abort search
    """
    from nxpipe.pipeline.rollout.signals import abort

    _tell(console, fleet, config_path, abort)


def _tell(console: Console, fleet: str, config_path: Path, say: "Callable[..., Answer]") -> None:
    import os

    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.fleets import serving_fleet
    from nxpipe.pipeline.rollout.machine import Machine

    config = load_config(config_path, os.environ)
    answer = say(Machine(config, serving_fleet(config, fleet, "FLEET")))
    if console.json:
        console.data({"execution": answer.execution, "signal": answer.signal, "changed": answer.changed})
    else:
        console.result(answer.sentence)
