"""`nxpipe rollout status`."""

from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import ACTOR, config_option, key_option, store_option
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@click.argument("fleet", required=False)
@click.option("--wait", is_flag=True, help="Stay until it has ended, or needs a person.")
@click.option("--actor", type=ACTOR, help="Who, for the channel's log.  [default: as for nxpipe promote]")
@key_option
@store_option
@config_option
@click.pass_context
def status(
    ctx: click.Context,
    fleet: str | None,
    wait: bool,
    actor: str | None,
    key: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Show where rollouts stand, and wait for the end of one.

    FLEET may be left out: all fleets are told of then. The exit code is 0 but for one fleet whose last rollout went
    back, lacked instances, was refused, or awaits a person.

    With --wait, a rollout that has promoted moves the fleet's channel, if the command that started it did not live to
    do so. Ctrl-C leaves the rollout alone.

    \b
    Example:
      nxpipe rollout status search --wait
    """
    from nxpipe.pipeline.rollout.ending import end, exit_code, settle_line
    from nxpipe.pipeline.rollout.follow import follow
    from nxpipe.pipeline.rollout.opened import fleets_of, opened
    from nxpipe.pipeline.rollout.view import picture

    console: Console = ctx.obj
    names = [fleet] if fleet else fleets_of(config_path)
    if wait and len(names) != 1:
        raise click.UsageError("--wait is for one fleet; name it", ctx)
    if wait:
        from nxpipe.pipeline.artifacts.actor import current_actor

        one = opened(console, names[0], store, config_path, actor=actor or current_actor(), key=key)
        ctx.exit(end(console, one, follow(console, names[0], one.watcher.status)))
    told = [(one, one.watcher.status()) for name in names for one in [opened(console, name, store, config_path)]]
    if console.json:
        found = [status.as_json() for _, status in told]
        console.data(found[0] if fleet else found)
    else:
        for one, status in told:
            console.page(picture(status))
            if said := settle_line(one, status):
                console.say(said)
    if fleet:
        ctx.exit(exit_code(told[0][1]))


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
    from nxpipe.pipeline.rollout.errors import RolloutRefused
    from nxpipe.pipeline.rollout.log_text import log_text
    from nxpipe.pipeline.rollout.looks import Looks
    from nxpipe.pipeline.rollout.opened import opened

    one = opened(console, fleet, store, config_path)
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
    kept = Looks.at(one.artifacts.store, fleet, found.name)
    looks = kept.refresh()
    if not console.json:
        console.page(log_text(found, looks))
    elif plan := kept.plan_text():
        console.data_text("\n".join([plan, *(look.text for look in looks)]))
