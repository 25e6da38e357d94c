"""What `promote` and `rollback` share: who, why and where, and what is said when it is done."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.channels.colours import fleet_of
from pipeline.channels.signing import key_option
from pipeline.command_line.options import ACTOR, REASON, Label, config_option, store_option
from pipeline.command_line.output import Console

if TYPE_CHECKING:
    from artifact_store.channel.log import Appended

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


def record(console: Console, appended: "Appended") -> None:
    """Tell what the channel serves, and whether that is new."""
    from pipeline.channels.text import generation_data, served_lines

    generation = appended.generation
    if console.json:
        console.data({"changed": appended.changed, **generation_data(generation)})
        return
    verb = "serves now" if appended.changed else "serves this already"
    console.say(f"Channel {generation.channel} {verb}, as generation {generation.generation}:")
    console.result(*served_lines(generation))
