"""`nxpipe rollout start`: start a rollout, and wait for its end with --wait."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.completion import complete_artifacts, complete_channels, complete_fleets
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import (
    ACTOR,
    REASON,
    Label,
    config_option,
    key_option,
    minute_option,
    require_reason,
    store_option,
    without_evidence_option,
)
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.context import RolloutContext
    from nxpipe.pipeline.rollout.start import StartedRollout


@click.command(cls=Command)
@click.argument("fleet", shell_complete=complete_fleets)
@click.argument("artifact", required=False, shell_complete=complete_artifacts)
@click.option(
    "--channel",
    type=Label("channel"),
    shell_complete=complete_channels,
    help="Roll out the artifact that this channel serves, instead of ARTIFACT.",
)
@click.option("--to", type=Choice(("blue", "green")), help="Fail unless this is the idle environment.")
@click.option(
    "--again",
    is_flag=True,
    help="Start even if the fleet runs the artifact already, or a rollout of it was rolled back.",
)
@click.option("--wait", is_flag=True, help="Wait until the rollout ends or needs an operator.")
@minute_option
@click.option("--reason", type=REASON, default="", help="The reason, for the records.")
@without_evidence_option
@click.option("--actor", type=ACTOR, help="The identity, for the records.  [default: as for nxpipe promote]")
@key_option("the changes of channels, not artifacts")
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
    without: tuple[str, ...],
    actor: str | None,
    key: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Start a canary rollout of an artifact on a fleet.

    The plan is [rollout] of nxpipe.toml. Latency thresholds are frozen first, from the old version's metrics in
    CloudWatch; if there are too few, only errors are evaluated, and the command reports it.

    The fleet's channel is updated once the rollout has promoted: by this command with --wait, else by `nxpipe rollout
    status --wait` or the next start. Repeating a start is idempotent: it reports the same rollout in any state.
    With --wait, the exit code reports how the rollout ended; Ctrl-C does not affect the rollout.

    \b
    Example:
      nxpipe rollout start search bert-base-uncased@4e9ce0 --wait
      nxpipe rollout start search --channel staging --to green
    """

    from nxpipe.pipeline.artifacts.identity import current_identity
    from nxpipe.pipeline.rollout.context import open_context
    from nxpipe.pipeline.rollout.start import AlreadyServed, StartRequest, report_already_served, start_rollout

    console: Console = ctx.obj
    require_reason(without, reason)
    if (artifact is None) == (channel is None):
        raise click.UsageError("pass either ARTIFACT or --channel", ctx)
    rollout = open_context(console, fleet, store, config_path, actor=actor or current_identity(), key=key)
    candidate = rollout.artifacts.resolve(artifact) if artifact else rollout.artifacts.served_and_signed(str(channel))
    started = start_rollout(console, rollout, StartRequest(candidate, to, again, int(minute), reason, without))
    if isinstance(started, AlreadyServed):
        report_already_served(console, rollout, started)
    else:
        ctx.exit(_follow(console, rollout, started, wait))


def _follow(console: Console, rollout: "RolloutContext", started: "StartedRollout", wait: bool) -> int:
    """Wait for the end with --wait, else print the command that waits for it."""
    from nxpipe.pipeline.rollout.follow import finish, follow

    watcher, fleet = rollout.watcher, rollout.fleet.name
    if wait or started.is_over:
        return finish(console, rollout, follow(console, fleet, lambda: watcher.status(started.arn)))
    if console.json:
        console.data(watcher.status(started.arn).as_json())
    else:
        console.result(f"Watch it with: nxpipe rollout status {fleet} --wait")
    return 0
