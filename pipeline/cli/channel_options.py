"""What `promote` and `rollback` share: who, why and where, and what is said when it is done."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxpipe.pipeline.artifacts.channels import fleet_of_channel
from nxpipe.pipeline.cli.options import ACTOR, REASON, Label, config_option, key_option, store_option
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.generation import Generation
    from nxpipe.artifact_store.channel.log import Appended

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
    fleet = fleet_of_channel(channel)
    if fleet is not None and not past_rollouts:
        raise click.UsageError(
            f"channel {channel} belongs to the rollouts of fleet {fleet}; serve another version with: nxpipe rollout "
            f"start {fleet} MODEL@KEY, or pass --past-rollouts to change it without one"
        )


def record(console: Console, appended: "Appended", store: "Store", typed_key: str | None) -> None:
    """Tell what the channel serves, whether that is new, and what a key has signed of it."""
    from nxpipe.pipeline.artifacts.channel_log import generation_data, served_lines

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
