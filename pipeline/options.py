"""Options that several commands share. Light: importing them loads no configuration."""

from pathlib import Path

import click

from pipeline.store_url import VARIABLE

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

store_option = click.option(
    "--store",
    metavar="URL",
    help=f"The store: a folder, or s3://bucket/prefix.  [default: {VARIABLE}, then [store] url of nxpipe.toml]",
)
