"""`nxpipe doctor`."""

import click

from nxpipe.pipeline.cli.installation import Finding, examine
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.exit_codes import SOFTWARE
from nxpipe.pipeline.util.text import table

_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red"}


@click.command(cls=Command)
@click.pass_context
def doctor(ctx: click.Context) -> None:
    """Say what is installed, what is missing for which command.

    With the way to get it. Ends in exit code 4 when anything that is not optional is missing.

    \b
    Example:
      nxpipe doctor
    """
    console: Console = ctx.obj
    findings = examine()
    if console.json:
        console.data([_as_json(finding) for finding in findings])
    else:
        console.page(table(("state", "what", "needed for", "found, or how to get it"), [_row(f) for f in findings]))
    missing = [finding.need.what for finding in findings if finding.state == "missing"]
    if missing:
        console.say(f"Missing: {', '.join(missing)}.")
        ctx.exit(SOFTWARE.number)
    console.say("Everything that is not optional is here.")


def _row(finding: Finding) -> tuple[str, str, str, str]:
    state = style(finding.state, fg=_COLOURS[finding.state])
    return state, finding.need.what, finding.need.needed_for, finding.found or finding.need.get_it


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "what": finding.need.what,
        "state": finding.state,
        "needed_for": finding.need.needed_for,
        "found": finding.found,
        "get_it": finding.need.get_it,
    }
