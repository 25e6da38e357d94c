"""`nxpipe config`: validate nxpipe.toml, show effective values, print the JSON Schema."""

import os
from dataclasses import asdict
from pathlib import Path

import click

from nxpipe.pipeline.artifacts.signing import unused_channels
from nxpipe.pipeline.artifacts.store_url import require_lasting_store, store_url
from nxpipe.pipeline.cli.main import Group
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.config import json_schema, load_config, origins
from nxpipe.pipeline.config.messages import shown
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table


@click.group(cls=Group)
def config() -> None:
    """Validate, show or describe nxpipe.toml.

    \b
    Example:
      nxpipe config check
    """


@config.command()
@click.option(
    "--for-release", is_flag=True, help="Also require a store that GitHub's jobs share: no folder of a runner."
)
@config_option
@click.pass_obj
def check(console: Console, for_release: bool, config_path: Path) -> None:
    """Validate nxpipe.toml and report all faults.

    \b
    Example:
      nxpipe config check --config staging.toml
      nxpipe config check --for-release
    """
    loaded = load_config(config_path, os.environ)
    if for_release:
        require_lasting_store(store_url(None, config_path), os.environ)
    for sentence in unused_channels(loaded):
        console.say(f"Note: {sentence}")
    if console.json:
        console.data({"file": str(config_path), "models": len(loaded.models), "fleets": len(loaded.fleets)})
        return
    console.result(
        f"{config_path} is valid: {_count(len(loaded.models), 'model')}, {_count(len(loaded.fleets), 'fleet')}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@config.command()
@config_option
@click.pass_obj
def show(console: Console, config_path: Path) -> None:
    """Print every effective value and its origin.

    The origin is a line of the file, an environment variable, or the default.

    \b
    Example:
      nxpipe config show
      NXPIPE_BUILD_PARALLELISM=4 nxpipe config show --json
    """
    settings = origins(config_path, os.environ)
    if console.json:
        console.data([asdict(setting) for setting in settings])
        return
    rows = [
        (setting.key, "not set" if setting.value is None else shown(setting.value), str(setting.origin))
        for setting in settings
    ]
    console.page(table(("KEY", "VALUE", "FROM"), rows))


@config.command()
@click.pass_obj
def schema(console: Console) -> None:
    """Print the JSON Schema for editors.

    \b
    Example:
      nxpipe config schema > nxpipe.schema.json
    """
    console.data(json_schema())
