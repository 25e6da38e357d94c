"""`nxpipe store`: everything that is done to a store beside building and promoting."""

import click

from pipeline.cli import LazyGroup

STORE_COMMANDS = {
    "ls": ("pipeline.commands.store.listing:ls", "List every artifact, the newest first."),
    "show": ("pipeline.commands.store.listing:show", "Show one artifact: programs, weights, figures, key."),
}


@click.group(cls=LazyGroup, homes=STORE_COMMANDS)
def store() -> None:
    """List and inspect published artifacts.

    \b
    Example:
      nxpipe store ls
      nxpipe store show bert-base-uncased
    """
