"""`nxpipe rollback`."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.artifacts.signing import author_signature, trust_in
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.channel import change_options, record, refuse_of_rollouts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import Line
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@change_options
@click.option(
    "--to", type=click.IntRange(1), metavar="N", help="The generation to bring back.  [default: the last other state]"
)
@click.option("--expect", type=click.IntRange(1), metavar="N", help="Refuse unless the channel is at generation N.")
@click.option(
    "--despite-policy",
    "despite",
    type=Line(1000),
    metavar="REASON",
    help="Bring back what no key that counts has signed, and say in the log why.",
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
    """Serve again what a channel served before.

    Adds a generation with the state of an earlier one: nothing is compiled, copied or forgotten. A second rollback
    goes back one state more; to repeat one whose answer was lost, say --expect or --to. The actor is found as in
    `nxpipe promote`.

    Refused is what a promotion to the channel would refuse for want of a signature, unless it is served already. Where
    a key expired at the wrong moment, --despite-policy is the way out: the log tells of it for ever.

    \b
    Example:
      nxpipe rollback --channel production --reason "p99 doubled"
      nxpipe rollback --channel production --to 7
    """
    from nxpipe.artifact_store.channel import change
    from nxpipe.pipeline.artifacts.actor import current_actor
    from nxpipe.pipeline.config import load_config

    refuse_of_rollouts(channel, past_rollouts=past_rollouts)
    config = load_config(config_path, os.environ, missing_ok=True)
    opened = open_uncached_store(store, config_path, console)
    sign = author_signature(key, config, config_path.parent, channel, opened)
    author = change.Author(actor or current_actor(), reason, sign)
    trust = trust_in(config, config_path.parent, opened, console.say)
    doubt = trust.policy.judge(opened, channel) if trust.policy else None
    appended = change.rollback(
        opened, channel, author, to=to, expected=expect, doubt=doubt, despite=despite, trust=trust
    )
    record(console, appended, opened, key)
