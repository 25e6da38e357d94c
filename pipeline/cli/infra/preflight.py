"""`nxpipe infra preflight`: what the AWS account lacks for the deployment."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import state_table

if TYPE_CHECKING:
    from nxpipe.pipeline.fleet.preflight_rules import PreflightReport


@click.command(cls=Command)
@click.option("--region", metavar="REGION", help="The region to check.  [default: the project's]")
@config_option
@click.pass_context
def preflight(ctx: click.Context, region: str | None, config_path: Path) -> None:
    """Check what the AWS account lacks for the deployment.

    Reads quotas, offerings of instance types by zone, images, the store's bucket and channels, reservations and more,
    as far as nxpipe.toml needs them, and changes nothing. A check without permission is a row in state "unknown", with
    the missing action. Exits with code 33 if a row fails.

    \b
    Example:
      nxpipe infra preflight
      nxpipe infra preflight --region us-west-2 --json
    """
    from nxpipe.pipeline.fleet.preflight import preflight as examine

    console: Console = ctx.obj
    report = examine(config_path, region, console.step)
    if console.json:
        console.data(_as_json(report))
    else:
        console.page(_table(report))
    counts = {state: report.count(state) for state in ("ok", "fails", "unknown")}
    console.say(f"{counts['fails']} of {len(report.rows)} checks fail, {counts['unknown']} are unknown.")
    ctx.exit(report.exit_code.number)


def _table(report: "PreflightReport") -> str:
    """Obstacles first."""
    header = ("STATE", "CHECK", "WHAT", "FOUND", "NEEDED", "REMEDY")
    ordered = sorted(report.rows, key=lambda row: ("fails", "unknown", "ok").index(row.state))
    return state_table(header, [(row.state, row.check, row.what, row.found, row.needed, row.remedy) for row in ordered])


def _as_json(report: "PreflightReport") -> dict[str, object]:
    return {
        "format": "nxpipe.preflight/1",
        "account": report.account,
        "region": report.region,
        "rows": [asdict(row) for row in report.rows],
    }
