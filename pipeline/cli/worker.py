"""`nxpipe worker`: run one job of a build in AWS Batch."""

import os
from typing import Final

import click

from nxpipe.pipeline.artifacts.store_url import VARIABLE
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.util.console import Console

_INDEX_VARIABLE: Final = "AWS_BATCH_JOB_ARRAY_INDEX"


@click.command(cls=Command)
@click.option("--items", required=True, metavar="DIGEST", help="The digest of the job list, a blob of the store.")
@click.pass_context
def worker(ctx: click.Context, items: str) -> None:
    """Run one job of a build on the build farm.

    AWS_BATCH_JOB_ARRAY_INDEX selects the job from the list, by default the first; NXPIPE_STORE_URL is the store.
    `nxpipe build --executor batch` submits array jobs that run this command; run it by hand only to debug a failure.
    Exits with the code of the job's failure.

    \b
    Example:
      nxpipe worker --items 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    """
    from nxpipe.artifact_store.layout import is_key
    from nxpipe.pipeline.build.executors.batch_worker import run_array_job

    console: Console = ctx.obj
    url, index = os.environ.get(VARIABLE), os.environ.get(_INDEX_VARIABLE, "0")
    if not url:
        raise click.UsageError(f"{VARIABLE} is not set; set it to the store of the job list", ctx)
    if not is_key(items) or not index.isdecimal():
        raise click.UsageError(
            f"--items must be 64 hex digits and {_INDEX_VARIABLE} a number; found {items!r} and {index!r}", ctx
        )
    finished = run_array_job(url, items, int(index), lambda text: console.result(*text.split("\n")))
    ctx.exit(finished.failure.code if finished.failure else 0)
