"""`nxpipe store doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.store.itself import open_the_store_itself
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.artifact_store.upkeep.doctor import Diagnosis

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

    opened = open_the_store_itself(store, config_path, console)
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
