"""`nxpipe rollback`: append a generation with the artifacts of an earlier one to a channel."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.channel import change_options, record, require_managed_by_hand
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import OneLine
from nxpipe.pipeline.cli.param_types import Count
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@change_options
@click.option(
    "--to", type=Count(1), metavar="N", help="The generation to restore.  [default: the last one that differs]"
)
@click.option("--expect", type=Count(1), metavar="N", help="Fail unless the channel is at generation N.")
@click.option(
    "--despite-policy",
    "despite",
    type=OneLine(1000),
    metavar="REASON",
    help="Restore artifacts without a trusted signature; the reason goes to the log.",
)
@click.pass_obj
def rollback(
    console: Console,
    channel: str,
    reason: str,
    actor: str | None,
    key: str | None,
    past_rollouts: bool,
    to: int | None,
    expect: int | None,
    despite: str | None,
    store: str | None,
    config_path: Path,
) -> None:
    """Restore the artifacts that a channel served before.

    Appends a generation with the state of an earlier one; nothing is compiled, copied or deleted. A second rollback
    goes one state further back; pass --expect or --to to retry a rollback whose result is unknown. The identity is that
    of `nxpipe promote`.

    Fails if a promotion to the channel would fail for a missing signature, unless the artifact is served already. If a
    key expired, --despite-policy overrides this and is recorded in the log. No evidence is required: what is restored
    was served before.

    \b
    Example:
      nxpipe rollback --channel production --reason "p99 doubled"
      nxpipe rollback --channel production --to 7
    """
    from nxpipe.pipeline.artifacts.channels import rehearsals_of
    from nxpipe.pipeline.artifacts.promotion import ChannelChange
    from nxpipe.pipeline.config import load_config

    require_managed_by_hand(channel, past_rollouts=past_rollouts)
    config, folder = load_config(config_path, os.environ, missing_ok=True), config_path.parent
    opened = open_uncached_store(store, config_path, console)
    change = ChannelChange(opened, config, folder, channel, reason, actor, key, console.say)
    appended = change.rollback(to=to, expect=expect, despite=despite)
    record(console, appended, opened, key, rehearsals_of(config, folder, channel))
