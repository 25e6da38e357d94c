"""`nxpipe rollback`: append a generation with the artifacts of an earlier one to a channel."""

import os
from pathlib import Path

import click

from nxpipe.pipeline.artifacts.signing import author_signature, trust_in
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.channel import change_options, record, require_unmanaged
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
    from nxpipe.artifact_store.channel import change
    from nxpipe.pipeline.artifacts.channels import program_check, rehearsals_of
    from nxpipe.pipeline.artifacts.identity import current_identity
    from nxpipe.pipeline.config import load_config

    require_unmanaged(channel, past_rollouts=past_rollouts)
    config = load_config(config_path, os.environ, missing_ok=True)
    opened = open_uncached_store(store, config_path, console)
    sign = author_signature(key, config, config_path.parent, channel, opened)
    author = change.Author(actor or current_identity(), reason, sign)
    trust = trust_in(config, config_path.parent, opened, console.say)
    doubt = trust.policy.artifact_check(opened, channel) if trust.policy else None
    appended = change.rollback(
        opened,
        channel,
        author,
        to=to,
        expected=expect,
        check_artifact=doubt,
        check_programs=program_check(config, config_path.parent, channel),
        despite=despite,
        trust=trust,
    )
    record(console, appended, opened, key, rehearsals_of(config, config_path.parent, channel))
