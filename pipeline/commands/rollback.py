"""`nxpipe rollback`."""

import os
from pathlib import Path

import click

from pipeline.change_options import change_options, record
from pipeline.cli import Command
from pipeline.commands.store.itself import open_the_store_itself
from pipeline.output import Console
from pipeline.signing import author_signature


@click.command(cls=Command)
@change_options
@click.option(
    "--to", type=click.IntRange(1), metavar="N", help="The generation to bring back.  [default: the last other state]"
)
@click.option("--expect", type=click.IntRange(1), metavar="N", help="Refuse unless the channel is at generation N.")
@click.pass_obj
def rollback(
    console: Console,
    channel: str,
    reason: str,
    actor: str | None,
    key: str | None,
    to: int | None,
    expect: int | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Serve again what a channel served before.

    Adds a generation with the state of an earlier one: nothing is compiled, copied or forgotten. A second rollback
    goes back one state more; to repeat one whose answer was lost, say --expect or --to. The actor is found as in
    `nxpipe promote`.

    \b
    Example:
      nxpipe rollback --channel production --reason "p99 doubled"
      nxpipe rollback --channel production --to 7
    """
    from artifact_store.channel import change
    from pipeline.actor import current_actor
    from pipeline.config import load_config

    config = load_config(config_path, os.environ, missing_ok=True)
    sign = author_signature(key, config, config_path.parent, channel)
    author = change.Author(actor or current_actor(), reason, sign)
    opened = open_the_store_itself(store, config_path, console)
    record(console, change.rollback(opened, channel, author, to=to, expected=expect))
