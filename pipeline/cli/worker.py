"""`nxpipe worker`."""

import os
from typing import Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.store_url import VARIABLE
from nxpipe.pipeline.util.console import Console

_PLACE: Final = "AWS_BATCH_JOB_ARRAY_INDEX"


@click.command(cls=Command)
@click.option("--items", required=True, metavar="DIGEST", help="The list of items: a blob of the store.")
@click.pass_context
def worker(ctx: click.Context, items: str) -> None:
    """Carry out items of a build on a build farm.

    One item: that of the list whose place AWS_BATCH_JOB_ARRAY_INDEX names, the first one where it is not set. The
    store is that of NXPIPE_STORE_URL. `nxpipe build --executor batch` submits jobs that run this; nobody types it but
    to look into a failure. It ends in the exit code of the item's own failure.

    \b
    Example:
      nxpipe worker --items 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    """
    from nxpipe.artifact_store.layout import is_key
    from nxpipe.pipeline.build.executors.batch_worker import run_array_job

    console: Console = ctx.obj
    url, place = os.environ.get(VARIABLE), os.environ.get(_PLACE, "0")
    if not url:
        raise click.UsageError(f"{VARIABLE} is not set; it names the store that the list of items is in", ctx)
    if not is_key(items) or not place.isdecimal():
        raise click.UsageError(f"--items takes 64 hex digits, {_PLACE} a number; they are {items!r} and {place!r}", ctx)
    ended = run_array_job(url, items, int(place), lambda text: console.result(*text.split("\n")))
    ctx.exit(ended.failure.code if ended.failure else 0)
