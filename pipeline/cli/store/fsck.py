"""`nxpipe store doctor` and `nxpipe store fsck`: the properties of a backend, and the integrity of its objects."""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import CORRUPT, OK, STORE, ExitCode
from nxpipe.pipeline.util.progress import Progress
from nxpipe.pipeline.util.text import human_bytes, style, table

if TYPE_CHECKING:
    from nxpipe.artifact_store.backends.protocol import Sent
    from nxpipe.artifact_store.maintenance.collection import Finding, Health
    from nxpipe.artifact_store.maintenance.doctor import Diagnosis


_COLOURS = {"pass": "green", "fail": "red", "not applicable": "yellow", "not proved": "yellow"}


@click.command(cls=Command)
@store_option
@config_option
@click.pass_obj
def doctor(console: Console, store: str | None, config_path: Path) -> None:
    """Check that a folder or bucket can hold a store safely.

    Writes to a temporary prefix in the store and removes it. A failure of a required property is an error; a failure
    of any other property is reported. A property that cannot be tested for lack of a permission is reported as "not
    proved", with the permission.

    \b
    Example:
      nxpipe store doctor --store s3://my-artifacts/nxpipe
    """
    from nxpipe.artifact_store.maintenance.doctor import examine, require_safety

    opened = open_uncached_store(store, config_path, console)
    diagnoses = list(examine(opened.backend))
    if console.json:
        console.data([_as_json(diagnosis) for diagnosis in diagnoses])
    else:
        console.page(table(("verdict", "property", "observed", "reason"), [_row(diagnosis) for diagnosis in diagnoses]))
    require_safety(opened.url, diagnoses)
    console.say(f"{opened.url} can hold a store safely.")


def _row(diagnosis: "Diagnosis") -> tuple[str, ...]:
    verdict = style(diagnosis.verdict, fg=_COLOURS[diagnosis.verdict])
    return verdict, diagnosis.probe.name, diagnosis.detail, diagnosis.probe.why if diagnosis.verdict == "fail" else ""


def _as_json(diagnosis: "Diagnosis") -> dict[str, object]:
    return {
        "property": diagnosis.probe.name,
        "verdict": diagnosis.verdict,
        "vital": diagnosis.probe.vital,
        "seen": diagnosis.detail,
        "denied": diagnosis.denied
        and {"permission": diagnosis.denied.permission, "operation": diagnosis.denied.operation},
        "why": diagnosis.probe.why,
    }


@click.command(cls=Command)
@click.option("--repair-from", metavar="URL", help="Another store or a cache folder with intact copies.")
@store_option
@config_option
@click.pass_context
def fsck(ctx: click.Context, repair_from: str | None, store: str | None, config_path: Path) -> None:
    """Read and verify the whole store; repair it with --repair-from.

    Verifies every record, every blob of every artifact, every tensor of a pack, and the log of every channel. Exits
    with code 22 if objects are missing or corrupt and were not repaired, and with 20 if objects could not be read.
    Records are never repaired; their message states the remedy.

    \b
    Example:
      nxpipe store fsck
      nxpipe store fsck --repair-from s3://my-replica/nxpipe
    """
    from nxpipe.artifact_store import open_store
    from nxpipe.artifact_store.maintenance.collection import fsck as check

    console: Console = ctx.obj
    opened = open_uncached_store(store, config_path, console)
    source = open_store(repair_from) if repair_from else None
    with ExitStack() as stack:

        def begin(total: int) -> "Sent":
            return stack.enter_context(Progress(console, "reading", total)).sent

        health = check(opened, source=source, begin=begin)
    if console.json:
        console.data(asdict(health))
    else:
        for finding in health.findings:
            console.result(f"{_verdict(finding)}  {finding.fault}")
    console.say(
        f"{health.blobs} blobs of {human_bytes(health.bytes)} are referenced; {len(health.unrepaired)} findings open, "
        f"{sum(finding.repaired for finding in health.findings)} were repaired; {health.orphans} objects of "
        f"{human_bytes(health.orphaned)} are orphans{_outlook(health)}."
    )
    ctx.exit(_outcome(health).number)


def _outlook(health: "Health") -> str:
    """The suffix about orphans. Objects of an unreadable record look like orphans; gc keeps them until a repair."""
    return ", which gc removes" if health.is_sound else ", judged by the readable records only"


def _verdict(finding: "Finding") -> str:
    if finding.repaired:
        return "repaired"
    return "unreadable" if finding.unreadable else "bad"


def _outcome(health: "Health") -> ExitCode:
    """The exit code; CORRUPT has priority over STORE."""
    if health.is_sound:
        return OK
    return STORE if all(finding.unreadable for finding in health.unrepaired) else CORRUPT
