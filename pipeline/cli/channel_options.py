"""Options and output that `promote` and `rollback` share."""

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
    click.option("--reason", type=REASON, default="", help="The reason, recorded in the channel's log."),
    click.option("--actor", type=ACTOR, help="The identity, recorded in the channel's log.  [default: see above]"),
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
    """Refuses channels of environments: a change by hand would replace instances in the middle of a canary test."""
    fleet = fleet_of_channel(channel)
    if fleet is not None and not past_rollouts:
        raise click.UsageError(
            f"channel {channel} is moved by rollouts of fleet {fleet}; serve another version with: nxpipe rollout "
            f"start {fleet} MODEL@KEY, or pass --past-rollouts to change it without a rollout"
        )


def record(console: Console, appended: "Appended", store: "Store", typed_key: str | None) -> None:
    """Prints what the channel serves, whether that is new, and what was signed."""
    from nxpipe.pipeline.artifacts.channel_log import generation_data, served_lines

    generation = appended.generation
    key_ids = [each.key_id for each in generation.signatures] if appended.changed else []
    unsigned = _unsigned(store, generation) if key_ids or typed_key else []
    if console.json:
        about = {"changed": appended.changed, "signed_with": key_ids, "unsigned_artifacts": unsigned}
        console.data({**about, **generation_data(generation)})
        return
    verb = "now serves" if appended.changed else "already serves"
    console.say(f"Channel {generation.channel} {verb}, as generation {generation.generation}:")
    console.result(*served_lines(generation))
    if key_ids:
        console.say(f"  signed generation {generation.generation} with key {', '.join(key_ids)}")
    elif typed_key:
        console.say("  nothing was signed, because nothing changed")
    for name in unsigned:
        console.say(f"  {name} itself is not signed; to sign it: nxpipe store sign {name}")


def _unsigned(store: "Store", generation: "Generation") -> list[str]:
    """Artifacts without a signature: signing a generation vouches for the choice, not for the artifacts."""
    from nxpipe.artifact_store.trust.signatures import Signatures

    signatures = Signatures(store)
    return [each.name for each in generation.artifacts if not signatures.key_ids(each.manifest.sha256)]
