"""`nxpipe store du`."""

from dataclasses import asdict
from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.store.itself import open_the_store_itself
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import human_bytes, table


@click.command(cls=Command)
@store_option
@config_option
@click.pass_obj
def du(console: Console, store: str | None, config_path: Path) -> None:
    """Say how many bytes each model takes, shared and orphaned ones too.

    "logical" counts each artifact as if it were alone, "stored" every blob once, "own" those that no other model
    shares: what a collection could free if the model went.

    \b
    Example:
      nxpipe store du
    """
    from nxpipe.artifact_store.upkeep.usage import usage

    opened = open_the_store_itself(store, config_path, console)
    found = usage(opened)
    if console.json:
        console.data(asdict(found))
        return
    rows = [
        (each.model_id, str(each.artifacts), *map(human_bytes, (each.logical, each.stored, each.own)))
        for each in found.models
    ]
    console.page(table(("model", "artifacts", "logical", "stored", "own"), rows))
    console.say(
        f"{human_bytes(found.stored)} in {found.objects} objects; artifacts take {human_bytes(found.artifacts_stored)} "
        f"instead of {human_bytes(found.logical)}, {human_bytes(found.shared)} of it shared by several models; "
        f"{human_bytes(found.orphaned)} in {found.orphans} objects are orphaned."
    )
