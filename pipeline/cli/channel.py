"""`nxpipe channel log` and `show`; the options and the output that promote and rollback share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.completion import complete_channels
from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.options import ACTOR, REASON, Label, config_option, key_option, store_option
from nxpipe.pipeline.cli.param_types import Count
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.generation import Generation
    from nxpipe.artifact_store.channel.log import Appended


@click.group(cls=Group)
def channel() -> None:
    """Show the artifacts and the history of channels.

    A channel is a name, such as production, from which fleets resolve their artifacts. Each `nxpipe promote` and
    `nxpipe rollback` appends a generation to its log.

    \b
    Example:
      nxpipe channel show
      nxpipe channel log production
    """


@channel.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_channels)
@click.option("--last", type=Count(1), default=20, show_default=True, metavar="N", help="The number of generations.")
@store_option
@config_option
@click.pass_obj
def log(console: Console, name: str | None, last: int, store: str | None, config_path: Path) -> None:
    """Print a channel's log, the newest generation first.

    Every generation is verified by the digest in its successor. Where [signing] of nxpipe.toml requires signatures, a
    generation without a valid one is reported and the command exits with an error. Without NAME, prints the logs of all
    channels.

    \b
    Example:
      nxpipe channel log production
      nxpipe channel log production --last 3 --json
    """
    from nxpipe.pipeline.artifacts.channel_log import ChannelView, channel_log_data, channel_log_text

    view = ChannelView.of(open_uncached_store(store, config_path, console), config_path, console.say)
    entries = [entry for channel_name in view.names(name) for entry in view.history(channel_name, last)]
    if console.json:
        console.data([channel_log_data(entry) for entry in entries])
    else:
        _print(console, [channel_log_text(entry) for entry in entries], view.store.url)
    for entry in entries:
        entry.require_trust()


@channel.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_channels)
@store_option
@config_option
@click.pass_obj
def show(console: Console, name: str | None, store: str | None, config_path: Path) -> None:
    """Show the artifacts that a channel serves, since when, and their signatures.

    Signatures are verified with the keys of [signing] in nxpipe.toml. Fleets of the channel that are rehearsals are
    named. Without NAME, shows all channels.

    \b
    Example:
      nxpipe channel show production
      nxpipe channel show --json
    """
    from nxpipe.pipeline.artifacts.channel_log import ChannelView, channel_state_data, channel_state_text

    view = ChannelView.of(open_uncached_store(store, config_path, console), config_path, console.say)
    entries = [entry for channel_name in view.names(name) for entry in view.history(channel_name, 1)]
    signers = [
        {served: view.signers(entry.generation.channel, served) for served in entry.generation.artifacts}
        for entry in entries
    ]
    if console.json:
        console.data(
            [
                channel_state_data(entry, names, view.rehearsals(entry.generation.channel))
                for entry, names in zip(entries, signers, strict=True)
            ]
        )
    else:
        texts = [
            channel_state_text(entry, names, view.rehearsals(entry.generation.channel))
            for entry, names in zip(entries, signers, strict=True)
        ]
        _print(console, texts, view.store.url)
    for entry in entries:
        view.require_trust(entry)


def _print(console: Console, texts: list[str], url: str) -> None:
    if texts:
        console.page("\n\n".join(texts))
    else:
        console.say(f"{url} has no channels; create one with: nxpipe promote MODEL@KEY --channel NAME")


_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--channel",
        type=Label("channel"),
        required=True,
        shell_complete=complete_channels,
        help="The channel to change.",
    ),
    click.option("--reason", type=REASON, default="", help="The reason, for the channel's log."),
    click.option("--actor", type=ACTOR, help="The identity in the channel's log.  [default: see above]"),
    click.option(
        "--past-rollouts", is_flag=True, help="Allow a channel that rollouts manage: FLEET--blue or FLEET--green."
    ),
    key_option("the change of the channel, not the artifacts"),
    store_option,
    config_option,
)


def change_options(command: _Function) -> _Function:
    """Add the options of promote and rollback."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def require_managed_by_hand(channel: str, *, past_rollouts: bool) -> None:
    """Refuse a blue or green channel, unless the command line permits it."""
    from nxpipe.pipeline.artifacts.promotion import require_unmanaged

    if not past_rollouts:
        require_unmanaged(channel, "pass --past-rollouts")


def record(
    console: Console, appended: "Appended", store: "Store", typed_key: str | None, rehearsals: list[str]
) -> None:
    """Print the channel's artifacts, whether they changed, the signatures, and which of its fleets are rehearsals."""
    from nxpipe.pipeline.artifacts.channel_log import changes_data, generation_data, moved_lines, served_lines

    generation = appended.generation
    key_ids = [signature.key_id for signature in generation.signatures] if appended.changed else []
    unsigned = _unsigned(store, generation) if key_ids or typed_key else []
    if console.json:
        document = {
            "changed": appended.changed,
            "signed_with": key_ids,
            "unsigned_artifacts": unsigned,
            "rehearsals": rehearsals,
            "from_generation": appended.before.generation if appended.before else None,
            "changes": changes_data(appended.before.artifacts if appended.before else (), generation.artifacts)
            if appended.changed
            else [],
        }
        console.data({**document, **generation_data(generation)})
        return
    state = "changed" if appended.changed else "unchanged"
    console.say(f"Channel {generation.channel} {state}, generation {generation.generation}:")
    console.result(*served_lines(generation))
    if appended.before is not None:
        console.say(*moved_lines(appended.before, generation))
    for notice in rehearsals:
        console.say(f"  {notice}")
    if key_ids:
        console.say(f"  signed generation {generation.generation} with key {', '.join(key_ids)}")
    elif typed_key:
        console.say("  the channel did not change, so nothing was signed")
    for name in unsigned:
        console.say(f"  {name} is not signed; sign it with: nxpipe store sign {name}")


def _unsigned(store: "Store", generation: "Generation") -> list[str]:
    """Artifacts without a signature: a signed generation confirms the selection, not the artifacts."""
    from nxpipe.artifact_store.trust.signatures import Signatures

    signatures = Signatures(store)
    return [artifact.name for artifact in generation.artifacts if not signatures.key_ids(artifact.manifest.sha256)]
