"""The option by which every command finds its configuration."""

from pathlib import Path

import click

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default="nxpipe.toml",
    envvar="NXPIPE_CONFIG",
    show_default=True,
    show_envvar=True,
    metavar="PATH",
    help="The configuration file.",
)
