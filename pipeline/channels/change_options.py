"""What `promote` and `rollback` share: who, why and where, and what is said when it is done."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

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
    key_option,
    store_option,
    config_option,
)


def change_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


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
