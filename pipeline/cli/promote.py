"""`nxpipe promote`: append a generation with new artifacts to a channel."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.channel import change_options, record, require_managed_by_hand
from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import require_reason, without_evidence_option
from nxpipe.pipeline.cli.param_types import Count
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.config import Config


@click.command(cls=Command)
@click.argument("names", metavar="MODEL@KEY...", nargs=-1, required=True, shell_complete=complete_artifacts)
@change_options
@click.option("--expect", type=Count(0), metavar="N", help="Fail unless the channel is at generation N.")
@without_evidence_option
@click.pass_obj
def promote(
    console: Console,
    names: tuple[str, ...],
    channel: str,
    reason: str,
    actor: str | None,
    key: str | None,
    past_rollouts: bool,
    expect: int | None,
    without: tuple[str, ...],
    store: str | None,
    config_path: Path,
) -> None:
    """Promote artifacts to a channel.

    ARTIFACT is MODEL, MODEL@KEY or a key; a model may go by its name in nxpipe.toml. Each artifact replaces the one of
    the same model and target; all others stay. Fails for an incomplete
    artifact, for missing evidence or a missing signature that the channel requires, for programs that a fleet of the
    channel cannot run (those of the emulator, unless the fleet is a rehearsal), and if a fleet of the channel would be
    left without an artifact for its target.

    [channels.NAME] of nxpipe.toml sets the kinds of evidence; without it, a channel of a fleet with devices requires
    emulated and device, any other emulated.

    The identity is that of the GitHub run, else git's user, else the user of this machine.

    \b
    Example:
      nxpipe promote bert-base-uncased@4e9ce0 --channel production --reason "new tokenizer"
      nxpipe promote acme/rank@71f0aa acme/rank@c04e12 --channel production --expect 12
      nxpipe promote acme/rank@71f0aa --channel production --without-evidence device --reason "first promotion"
    """
    from nxpipe.pipeline.artifacts.channels import new_channel_warning, rehearsals_of
    from nxpipe.pipeline.artifacts.promotion import ChannelChange
    from nxpipe.pipeline.artifacts.requirements import unserved_channel_warning
    from nxpipe.pipeline.config import load_config

    require_reason(without, reason)
    require_managed_by_hand(channel, past_rollouts=past_rollouts)
    config, folder = load_config(config_path, os.environ, missing_ok=True), config_path.parent
    opened = open_uncached_store(store, config_path, console)
    if (sentence := unserved_channel_warning(config, channel)) or (
        sentence := new_channel_warning(opened, config, channel)
    ):
        console.say(f"Note: {sentence}")
    change = ChannelChange(opened, config, folder, channel, reason, actor, key)
    appended = change.promote(_select(opened, names, config, folder), expect=expect, without=without)
    record(console, appended, opened, key, rehearsals_of(config, folder, channel))


def _select(store: "Store", names: tuple[str, ...], config: "Config", folder: Path) -> "list[Published]":
    """The named artifacts without repeats, from one listing of the store. A model has its id in the store, or the name
    that nxpipe.toml gives it."""
    from nxpipe.artifact_store.names import choose
    from nxpipe.pipeline.artifacts.channels import model_ids

    published = store.list()
    stored = {artifact.model_id for artifact in published}
    ids = {name: id_ for name, id_ in model_ids(config, folder).items() if name not in stored}

    def full(name: str) -> str:
        model, at, key = name.partition("@")
        return f"{ids.get(model, model)}{at}{key}"

    chosen = [choose(full(name), published, store.url, store.serving_channels) for name in names]
    return list({artifact.request_key: artifact for artifact in chosen}.values())
