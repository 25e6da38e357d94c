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
    from nxpipe.pipeline.cli.rollout.context import open_context, serving_fleet_names
    from nxpipe.pipeline.rollout.finish import exit_code, finish, pending_promotion
    from nxpipe.pipeline.rollout.follow import follow
    from nxpipe.pipeline.rollout.render import status_page

    console: Console = ctx.obj
    names = [fleet] if fleet else serving_fleet_names(config_path)
    if wait and len(names) != 1:
        raise click.UsageError("--wait is for one fleet; name it", ctx)
    if wait:
        from nxpipe.pipeline.artifacts.identity import current_identity

        one = open_context(console, names[0], store, config_path, actor=actor or current_identity(), key=key)
        ctx.exit(finish(console, one, follow(console, names[0], one.watcher.status)))
    told = [(one, one.watcher.status()) for name in names for one in [open_context(console, name, store, config_path)]]
    if console.json:
        found = [status.as_json() for _, status in told]
        console.data(found[0] if fleet else found)
    else:
        for one, status in told:
            console.page(status_page(status))
            if said := pending_promotion(one, status):
                console.say(said)
    if fleet:
        ctx.exit(exit_code(told[0][1]))
