"""`nxpipe rollout log`."""

from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@click.argument("fleet")
@click.option("--execution", metavar="NAME", help="The rollout.  [default: the one under way, else the last one]")
@store_option
@config_option
@click.pass_obj
def log(console: Console, fleet: str, execution: str | None, store: str | None, config_path: Path) -> None:
    """Show what a rollout saw at each look, and what it made of it.

    With --json it is what `nxpipe rollout replay` reads: the plan, and then each record as it was written, a line each.

    \b
    Example:
      nxpipe rollout log search
      nxpipe rollout log search --json > rollout.jsonl
    """
    from nxpipe.pipeline.cli.rollout.context import open_context
    from nxpipe.pipeline.rollout.render import evaluation_table
    from nxpipe.pipeline.rollout.status import EvaluationLog
    from nxpipe.pipeline.util.errors import RolloutRefused

    one = open_context(console, fleet, store, config_path)
    machine = one.machine
    _ = machine.front
    if execution is None:
        owner = machine.record.read().owner
        found = machine.execution(owner) if owner else machine.last()
    else:
        found = machine.execution(machine.execution_arn(execution))
    if found is None:
        which = f"rollout {execution}" if execution else "rollout yet"
        raise RolloutRefused(f"there is no {which} of fleet {fleet}")
    kept = EvaluationLog.at(one.artifacts.store, fleet, found.name)
    looks = kept.refresh()
    if not console.json:
        console.page(evaluation_table(found, looks))
    elif plan := kept.plan_text():
        console.data_text("\n".join([plan, *(look.text for look in looks)]))
