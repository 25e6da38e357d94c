"""`nxpipe infra github`: the script that sets up the GitHub repository."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@config_option
@click.pass_obj
def github(console: Console, config_path: Path) -> None:
    """Print the script that sets up the GitHub repository of [release].

    It creates the environments of the release workflow and sets its variables with gh, from outputs of the stacks
    "storage" and "release", which must be deployed. It may be repeated. This command itself calls neither GitHub nor
    AWS.

    \b
    Example:
      nxpipe infra github
      nxpipe infra github | bash
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.fleet.github import setup_script

    script = setup_script(load_config(config_path, os.environ))
    if console.json:
        console.data({"script": script})
    else:
        console.page(script.removesuffix("\n"))
