"""`nxpipe store fsck`."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.store.itself import open_the_store_itself
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import CORRUPT, OK, STORE, ExitCode
from nxpipe.pipeline.util.progress import Progress
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store.backends.protocol import Sent
    from nxpipe.artifact_store.upkeep.fsck import Finding, Health


@click.command(cls=Command)
@click.option(
    "--repair-from", metavar="URL", help="Another store, or a cache folder, with good copies of what is bad here."
)
@store_option
@config_option
@click.pass_context
def fsck(ctx: click.Context, repair_from: str | None, store: str | None, config_path: Path) -> None:
    """Read and verify all that the store needs; repair it if asked.

    Every record, every blob of every artifact, every tensor of a pack, and the history of every channel. Ends in exit
    code 22 when something is missing or damaged and could not be repaired, and in 20 when something could not be read.
    Records are never repaired: they say themselves what to do.

    \b
    Example:
      nxpipe store fsck
      nxpipe store fsck --repair-from s3://my-replica/nxpipe
    """
    from nxpipe.artifact_store import open_store
    from nxpipe.artifact_store.upkeep.fsck import fsck as carry_out

    console: Console = ctx.obj
    opened = open_the_store_itself(store, config_path, console)
    source = open_store(repair_from) if repair_from else None
    with ExitStack() as shown:

        def begin(total: int) -> "Sent":
            return shown.enter_context(Progress(console, "reading", total)).sent

        health = carry_out(opened, source=source, begin=begin)
    if console.json:
        console.data(asdict(health))
    else:
        for finding in health.findings:
            console.result(f"{_verdict(finding)}  {finding.fault}")
    console.say(
        f"{health.blobs} blobs of {human_bytes(health.bytes)} are needed, {len(health.standing)} findings stand, "
        f"{sum(f.mended for f in health.findings)} were repaired; {health.orphans} objects of "
        f"{human_bytes(health.orphaned)} are orphans{_outlook(health)}."
    )
    ctx.exit(_outcome(health).number)


def _outlook(health: "Health") -> str:
    """What a record needs that tells nothing looks like an orphan; but nothing is collected while that stands."""
    return ", which a collection removes" if health.is_sound else " as far as can be told"


def _verdict(finding: "Finding") -> str:
    if finding.mended:
        return "repaired"
    return "unreadable" if finding.unreadable else "bad"


def _outcome(health: "Health") -> ExitCode:
    """Damage outweighs what could not be looked at."""
    if health.is_sound:
        return OK
    return STORE if all(finding.unreadable for finding in health.standing) else CORRUPT
