"""`nxpipe store doctor`."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.exit_codes import CORRUPT, OK, STORE, ExitCode
from nxpipe.pipeline.util.progress import Progress
from nxpipe.pipeline.util.text import human_bytes, table

if TYPE_CHECKING:
    from nxpipe.artifact_store.backends.protocol import Sent
    from nxpipe.artifact_store.upkeep.doctor import Diagnosis
    from nxpipe.artifact_store.upkeep.fsck import Finding, Health


_COLOURS = {"pass": "green", "fail": "red", "not applicable": "yellow", "not proved": "yellow"}


@click.command(cls=Command)
@store_option
@config_option
@click.pass_obj
def doctor(console: Console, store: str | None, config_path: Path) -> None:
    """Try out whether a folder or bucket can hold a store safely.

    Writes to a folder of its own in the store, and removes it. A failure of a vital property is an error that names
    it; of another one, a weakness to know. What a denied permission keeps from being tried is not proved: the
    permission is named, and whether the property holds stays open.

    \b
    Example:
      nxpipe store doctor --store s3://my-artifacts/nxpipe
    """
    from nxpipe.artifact_store.upkeep.doctor import examine, insist_on_safety

    opened = open_uncached_store(store, config_path, console)
    found = list(examine(opened.backend))
    if console.json:
        console.data([_as_json(each) for each in found])
    else:
        console.page(table(("verdict", "property", "seen", "why it matters"), [_row(each) for each in found]))
    insist_on_safety(opened.url, found)
    console.say(f"{opened.url} can hold a store safely.")


def _row(each: "Diagnosis") -> tuple[str, ...]:
    verdict = style(each.verdict, fg=_COLOURS[each.verdict])
    return verdict, each.probe.name, each.detail, each.probe.why if each.verdict == "fail" else ""


def _as_json(each: "Diagnosis") -> dict[str, object]:
    return {
        "property": each.probe.name,
        "verdict": each.verdict,
        "vital": each.probe.vital,
        "seen": each.detail,
        "denied": each.denied and {"permission": each.denied.permission, "operation": each.denied.operation},
        "why": each.probe.why,
    }


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
    opened = open_uncached_store(store, config_path, console)
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
