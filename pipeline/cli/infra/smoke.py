"""`nxpipe infra smoke`: the acceptance test of an account."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.param_types import DurationType
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import state_table, table

if TYPE_CHECKING:
    from nxpipe.pipeline.fleet.smoke import SmokeReport
    from nxpipe.pipeline.fleet.smoke_project import SmokePrice, SmokeProject

_POLL: Final = 5.0  # seconds
_SHORTEST: Final = 15 * 60.0  # an instance starts in about ten minutes


@click.command(cls=Command)
@click.option(
    "--limit",
    type=DurationType(),
    default="60m",
    show_default=True,
    help="The time after which everything is deleted, at least 15m.",
)
@click.option("--yes", is_flag=True, help="Start without confirmation; required without a terminal.")
@click.option("--resume", is_flag=True, help="Continue with the stacks of an earlier test.")
@click.option("--destroy", is_flag=True, help="Delete what an earlier test has left, and do nothing else.")
@config_option
@click.pass_context
def smoke(ctx: click.Context, limit: float, yes: bool, resume: bool, destroy: bool, config_path: Path) -> None:
    """Deploy one inf2.xlarge, send it one request, and delete everything.

    The acceptance test of an account, for about an hour. It has a project of its own, NAME-smoke, with own stacks and
    a tiny model; the region, the zones, [amis] and the lock files are those of nxpipe.toml. The instance serves the
    files of an artifact with programs of the emulator: a rehearsal, which runs nothing on the Neuron device.

    Prints the price first. Deletes everything at the end, after a failure, at --limit and at Ctrl-C. If this computer
    stops, EC2 Auto Scaling ends the instance at the same limit, and --destroy deletes the rest. Exits with code 33 if a
    step fails or something is left.

    \b
    Example:
      nxpipe infra smoke
      nxpipe infra smoke --limit 90m --yes --json
      nxpipe infra smoke --destroy
    """
    from nxpipe.pipeline.fleet.smoke import SmokeTest
    from nxpipe.pipeline.fleet.smoke_project import SmokeProject
    from nxpipe.pipeline.fleet.teardown import SmokeSteps

    _require_valid(limit, resume=resume, destroy=destroy)
    console: Console = ctx.obj
    project = SmokeProject.of(config_path)
    test = SmokeTest(project, limit, SmokeSteps(console.step, console.say, _POLL))
    test.check_stacks(may_exist=resume or destroy)
    price = None if destroy else _price(console, project, limit)
    if price is not None:
        _confirm(project, yes=yes)
    report = test.remove() if destroy else test.run()
    _show(console, project, price, report)
    ctx.exit(report.exit_code.number)


def _require_valid(limit: float, *, resume: bool, destroy: bool) -> None:
    if resume and destroy:
        raise click.UsageError("--resume continues a test and --destroy deletes it; pass one of them")
    if limit < _SHORTEST:
        raise click.BadParameter(
            "an instance takes about ten minutes to start; pass at least 15m", param_hint="--limit"
        )


def _price(console: Console, project: "SmokeProject", limit: float) -> "SmokePrice":
    with console.step(f"synthesize {project.name}"):
        price = project.prepare(limit)
    console.say(*_price_lines(project, price))
    return price


def _price_lines(project: "SmokeProject", price: "SmokePrice") -> list[str]:
    """Known prices first. An unknown one is named, so that the sum is not taken for the whole."""
    ordered = sorted(price.lines, key=lambda line: -(line.hourly or 0))
    rows = [(f"${line.hourly:.4f}" if line.hourly is not None else "unknown", line.what) for line in ordered]
    more = f" {price.unknown} prices are unknown and come in addition." if price.unknown else ""
    return [
        f"{project.name} in account {project.account.id}, {project.account.region}. By the hour:",
        *table(("PRICE", "WHAT"), rows).split("\n"),
        f"Known prices: ${price.hourly:.2f} an hour, ${price.total:.2f} for {price.hours} started hours.{more}",
        "A rehearsal: the instance serves the files of an artifact and runs nothing on its Neuron device.",
    ]


def _confirm(project: "SmokeProject", *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("this starts resources that cost money; confirm it with --yes")
    click.confirm(f"Deploy {project.name} and delete it again?", abort=True, err=True)


def _show(console: Console, project: "SmokeProject", price: "SmokePrice | None", report: "SmokeReport") -> None:
    if console.json:
        console.data(_as_json(project, price, report))
    else:
        rows = [(row.state, row.step, f"{row.seconds:.0f} s", row.found) for row in report.rows]
        console.page(state_table(("STATE", "STEP", "TIME", "FOUND"), rows))
    if report.left:
        console.complain(
            f"{report.stopped} before everything was deleted: {project.name} still costs money; run "
            "`nxpipe infra smoke --destroy`. EC2 Auto Scaling ends the instance at the limit."
        )
    elif report.stopped:
        console.complain(f"{report.stopped}; see the table for what was deleted.")
    fails = sum(row.state == "fails" for row in report.rows)
    console.say(f"{fails} of {len(report.rows)} steps fail.")


def _as_json(project: "SmokeProject", price: "SmokePrice | None", report: "SmokeReport") -> dict[str, object]:
    costs = None
    if price is not None:
        lines = [{"what": line.what, "hourly_usd": line.hourly} for line in price.lines]
        total = {"hourly_usd": round(price.hourly, 4), "limit_usd": round(price.total, 2), "unknown": price.unknown}
        costs = {**total, "hours": price.hours, "lines": lines}
    return {
        "format": "nxpipe.smoke/1",
        "project": project.name,
        "account": project.account.id,
        "region": project.account.region,
        "rehearsal": True,
        "price": costs,
        "rows": [asdict(row) for row in report.rows],
        "stopped": str(report.stopped) if report.stopped else None,
    }
