"""`nxpipe channel log` and `nxpipe channel show`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxpipe.pipeline.artifacts.colours import fleet_of
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.options import ACTOR, REASON, Label, config_option, key_option, store_option
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.generation import Generation
    from nxpipe.artifact_store.channel.log import Appended


@click.group(cls=Group)
def channel() -> None:
    """Show what channels serve, and their history.

    A channel is a name, such as production, under which fleets find what to serve. Each change of it, by
    `nxpipe promote` or `nxpipe rollback`, adds a generation to its history.

    \b
    Example:
      nxpipe channel show
      nxpipe channel log production
    """


@channel.command(cls=Command)
@click.argument("name", required=False)
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="How far to go back.")
@store_option
@config_option
@click.pass_obj
def log(console: Console, name: str | None, last: int, store: str | None, config_path: Path) -> None:
    """Print a channel's history, the newest generation first.

    Each generation is proved by the digest that the one after it holds. Where [signing] of nxpipe.toml asks for
    signatures, a generation without a good one is reported, and the command ends with an error. Without NAME the
    history of every channel is printed.

    \b
    Example:
      nxpipe channel log production
      nxpipe channel log production --last 3 --json
    """
    from nxpipe.pipeline.artifacts.text import log_data, log_text
    from nxpipe.pipeline.artifacts.view import ChannelView

    view = ChannelView.of(open_uncached_store(store, config_path, console), config_path, console.say)
    entries = [entry for each in view.names(name) for entry in view.history(each, last)]
    if console.json:
        console.data([log_data(entry) for entry in entries])
    else:
        _print(console, [log_text(entry) for entry in entries], view.store.url)
    for entry in entries:
        entry.require_belief()


@channel.command(cls=Command)
@click.argument("name", required=False)
@store_option
@config_option
@click.pass_obj
def show(console: Console, name: str | None, store: str | None, config_path: Path) -> None:
    """Show what a channel serves, since when, and who has signed it.

    Signatures are checked with the keys of [signing] in nxpipe.toml. Without NAME every channel is shown.

    \b
    Example:
      nxpipe channel show production
      nxpipe channel show --json
    """
    from nxpipe.pipeline.artifacts.text import state_data, state_text
    from nxpipe.pipeline.artifacts.view import ChannelView

    view = ChannelView.of(open_uncached_store(store, config_path, console), config_path, console.say)
    entries = [entry for each in view.names(name) for entry in view.history(each, 1)]
    signers = [
        {served: view.signers(entry.generation.channel, served) for served in entry.generation.artifacts}
        for entry in entries
    ]
    if console.json:
        console.data([state_data(entry, names) for entry, names in zip(entries, signers, strict=True)])
    else:
        texts = [state_text(entry, names) for entry, names in zip(entries, signers, strict=True)]
        _print(console, texts, view.store.url)
    for entry in entries:
        view.require_belief(entry)


def _print(console: Console, texts: list[str], url: str) -> None:
    if texts:
        console.page("\n\n".join(texts))
    else:
        console.say(f"{url} has no channel yet; to make one: nxpipe promote MODEL@KEY --channel NAME")


F = TypeVar("F", bound=Callable[..., Any])


_OPTIONS = (
    click.option("--channel", type=Label("channel"), required=True, help="The channel to change."),
    click.option("--reason", type=REASON, default="", help="Why, for whoever reads the log."),
    click.option("--actor", type=ACTOR, help="Who, for whoever reads the log.  [default: see above]"),
    click.option(
        "--past-rollouts", is_flag=True, help="Allow a channel that rollouts move: FLEET--blue or FLEET--green."
    ),
    key_option,
    store_option,
    config_option,
)


def change_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def refuse_of_rollouts(channel: str, *, past_rollouts: bool) -> None:
    """The colours' channels say what instances run while traffic is judged: by hand they would go past all of that."""
    fleet = fleet_of(channel)
    if fleet is not None and not past_rollouts:
        raise click.UsageError(
            f"channel {channel} belongs to the rollouts of fleet {fleet}; serve another version with: nxpipe rollout "
            f"start {fleet} MODEL@KEY, or pass --past-rollouts to change it without one"
        )


def record(console: Console, appended: "Appended", store: "Store", typed_key: str | None) -> None:
    """Tell what the channel serves, whether that is new, and what a key has signed of it."""
    from nxpipe.pipeline.artifacts.text import generation_data, served_lines

    generation = appended.generation
    key_ids = [each.key_id for each in generation.signatures] if appended.changed else []
    unsigned = _unsigned(store, generation) if key_ids or typed_key else []
    if console.json:
        about = {"changed": appended.changed, "signed_with": key_ids, "unsigned_artifacts": unsigned}
        console.data({**about, **generation_data(generation)})
        return
    verb = "serves now" if appended.changed else "serves this already"
    console.say(f"Channel {generation.channel} {verb}, as generation {generation.generation}:")
    console.result(*served_lines(generation))
    if key_ids:
        console.say(f"  signed generation {generation.generation} with key {', '.join(key_ids)}")
    elif typed_key:
        console.say("  the key has signed nothing, for nothing was changed")
    for name in unsigned:
        console.say(f"  {name} itself is not signed; to sign it: nxpipe store sign {name}")


def _unsigned(store: "Store", generation: "Generation") -> list[str]:
    """Artifacts that no key has spoken of: who signs a generation vouches for the choice, not for what was chosen."""
    from nxpipe.artifact_store.trust.signatures import Signatures

    signatures = Signatures(store)
    return [each.name for each in generation.artifacts if not signatures.key_ids(each.manifest.sha256)]
