"""`nxpipe rollout start`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import ACTOR, REASON, Label, config_option, key_option, store_option
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.beginning import Begun
    from nxpipe.pipeline.rollout.opened import Opened


@click.command(cls=Command)
@click.argument("fleet")
@click.argument("artifact", required=False)
@click.option("--channel", type=Label("channel"), help="Instead of ARTIFACT: what another channel serves.")
@click.option("--to", type=click.Choice(("blue", "green")), help="Refuse unless this colour is the one to fill.")
@click.option("--again", is_flag=True, help="Also what the fleet runs already, or what was rolled back before.")
@click.option("--wait", is_flag=True, help="Stay until it has ended, or needs a person.")
@click.option(
    "--minute",
    type=click.Choice(("1", "5", "10", "30", "60")),
    default="60",
    show_default=True,
    metavar="SECONDS",
    help="How long a minute is. Fewer than 60 are for rehearsals: a load balancer counts by the minute.",
)
@click.option("--reason", type=REASON, default="", help="Why, for whoever reads of it.")
@click.option("--actor", type=ACTOR, help="Who, for whoever reads of it.  [default: as for nxpipe promote]")
@key_option
@store_option
@config_option
@click.pass_context
def start(
    ctx: click.Context,
    fleet: str,
    artifact: str | None,
    channel: str | None,
    to: str | None,
    again: bool,
    wait: bool,
    minute: str,
    reason: str,
    actor: str | None,
    key: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Move a fleet's traffic to another artifact, step by step.

    The plan is [rollout] of nxpipe.toml. The latencies that it judges are frozen first, from how the old version has
    done by CloudWatch; where there is too little of that, errors alone are judged, and it says so.

    The fleet's channel moves when the rollout has promoted: by this command with --wait, else by `nxpipe rollout
    status --wait` or the next start. Repeating a start is harmless: the same rollout is told of, whatever became of
    it. With --wait the exit code tells how it ended; Ctrl-C leaves the rollout alone.

    \b
    Example:
      nxpipe rollout start search bert-base-uncased@4e9ce0 --wait
      nxpipe rollout start search --channel staging --to green
    """
    from nxpipe.pipeline.artifacts.actor import current_actor
    from nxpipe.pipeline.rollout.beginning import begin_wanted, served_already
    from nxpipe.pipeline.rollout.opened import opened
    from nxpipe.pipeline.rollout.start import ServedAlready, Wanted

    console: Console = ctx.obj
    if (artifact is None) == (channel is None):
        raise click.UsageError("name one ARTIFACT, or a --channel that serves it", ctx)
    one = opened(console, fleet, store, config_path, actor=actor or current_actor(), key=key)
    found = one.artifacts.chosen(artifact) if artifact else one.artifacts.served_for_certain(str(channel))
    begun = begin_wanted(console, one, Wanted(found, to, again, int(minute), reason))
    if isinstance(begun, ServedAlready):
        served_already(console, one, begun)
    else:
        ctx.exit(_watched(console, one, begun, wait))


def _watched(console: Console, one: "Opened", begun: "Begun", wait: bool) -> int:
    """To its end, or by whoever looks at it later."""
    from nxpipe.pipeline.rollout.ending import end
    from nxpipe.pipeline.rollout.follow import follow

    watcher, fleet = one.watcher, one.fleet.name
    if wait or begun.is_over:
        return end(console, one, follow(console, fleet, lambda: watcher.status(begun.arn)))
    if console.json:
        console.data(watcher.status(begun.arn).as_json())
    else:
        console.result(f"Watch it with: nxpipe rollout status {fleet} --wait")
    return 0
