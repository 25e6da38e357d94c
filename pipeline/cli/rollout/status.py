"""`nxpipe rollout status` and `log`: the state and the evaluations of rollouts."""

from pathlib import Path

import click

from nxpipe.pipeline.cli.completion import complete_fleets
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import ACTOR, config_option, html_option, key_option, store_option, write_page
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import page_width


@click.command(cls=Command)
@click.argument("fleet", required=False, shell_complete=complete_fleets)
@click.option("--wait", is_flag=True, help="Wait until the rollout ends or needs an operator.")
@click.option("--watch", is_flag=True, help="Follow the rollout until it ends, and change nothing.")
@click.option("--actor", type=ACTOR, help="The identity in the channel's log.  [default: as for nxpipe promote]")
@key_option("the changes of channels, not artifacts")
@store_option
@config_option
@click.pass_context
def status(
    ctx: click.Context,
    fleet: str | None,
    wait: bool,
    watch: bool,
    actor: str | None,
    key: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Show the state of rollouts, or follow one to its end.

    Without FLEET, shows all fleets and exits with code 0. For one fleet, the exit code is that of its last rollout:
    rolled back, no capacity, refused, or waiting for an operator.

    --watch and --wait show one changing screen on a terminal. Elsewhere they print a line when the traffic, the phase
    or the kind of verdict changes, and at least every five minutes. --wait also ends when an operator must decide, and
    updates the fleet's channel after a promotion if the command that started the rollout did not. Ctrl-C does not
    affect the rollout.

    \b
    Example:
      nxpipe rollout status search --watch
      nxpipe rollout status search --wait
    """
    from nxpipe.pipeline.rollout.context import open_context, serving_fleet_names
    from nxpipe.pipeline.rollout.follow import exit_code, finish, follow, pending_promotion
    from nxpipe.pipeline.rollout.render import status_page

    console: Console = ctx.obj
    names = [fleet] if fleet else serving_fleet_names(config_path)
    if wait and watch:
        raise click.UsageError("pass either --wait or --watch", ctx)
    if (wait or watch) and len(names) != 1:
        raise click.UsageError(f"{'--wait' if wait else '--watch'} requires FLEET", ctx)
    if wait:
        from nxpipe.pipeline.artifacts.identity import current_identity

        rollout = open_context(console, names[0], store, config_path, actor=actor or current_identity(), key=key)
        ctx.exit(finish(console, rollout, follow(console, names[0], rollout.watcher.status)))
    if watch:
        watched = open_context(console, names[0], store, config_path).watcher
        follow(console, names[0], watched.status, option="--watch")
    rollouts = (open_context(console, name, store, config_path) for name in names)
    states = [(rollout, rollout.watcher.status()) for rollout in rollouts]
    if console.json:
        documents = [status.as_json() for _, status in states]
        console.data(documents[0] if fleet else documents)
    else:
        for rollout, status in states:
            console.page(status_page(status, page_width()))
            if warning := pending_promotion(rollout, status):
                console.say(warning)
    if fleet:
        ctx.exit(exit_code(states[0][1]))


@click.command(cls=Command)
@click.argument("fleet", shell_complete=complete_fleets)
@click.option("--execution", metavar="NAME", help="The rollout.  [default: the current one, else the last one]")
@html_option
@store_option
@config_option
@click.pass_obj
def log(
    console: Console,
    fleet: str,
    execution: str | None,
    html_path: Path | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Show the evaluations of a rollout, with the evidence as odds.

    --json prints the input of `nxpipe rollout replay`: the plan and each record as it was written, one per line.

    \b
    Example:
      nxpipe rollout log search
      nxpipe rollout log search --json > rollout.jsonl
      nxpipe rollout log search --html rollout.html
    """
    from nxpipe.pipeline.rollout.context import open_context
    from nxpipe.pipeline.rollout.course import EvaluationLog
    from nxpipe.pipeline.rollout.render import evaluation_table
    from nxpipe.pipeline.util.errors import RolloutRefused

    rollout = open_context(console, fleet, store, config_path)
    machine = rollout.machine
    _ = machine.front
    if execution is None:
        owner = machine.record.read().owner
        rollout_execution = machine.execution(owner) if owner else machine.last()
    else:
        rollout_execution = machine.execution(machine.execution_arn(execution))
    if rollout_execution is None:
        which = f"rollout {execution}" if execution else "rollout yet"
        raise RolloutRefused(f"there is no {which} of fleet {fleet}")
    evaluation_log = EvaluationLog.at(rollout.artifacts.store, fleet, rollout_execution.name)
    evaluations = evaluation_log.refresh()
    if html_path is not None:
        from nxpipe.pipeline.rollout.page import rollout_page

        write_page(html_path, rollout_page(fleet, rollout_execution.name, evaluation_log), console)
    if not console.json:
        console.page(evaluation_table(rollout_execution, evaluations))
    elif plan := evaluation_log.plan_text():
        console.data_text("\n".join([plan, *(evaluation.text for evaluation in evaluations)]))
