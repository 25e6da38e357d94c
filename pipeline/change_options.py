"""What `promote` and `rollback` share: who, why and where, and what is said when it is done."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.options import config_option, store_option
from pipeline.output import Console
from pipeline.signing import key_option

if TYPE_CHECKING:
    from artifact_store.channel.log import Appended

F = TypeVar("F", bound=Callable[..., Any])


class ChannelName(click.ParamType[str]):
    """A name that can be a channel's."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch("[a-z0-9][a-z0-9-]{0,62}", str(value)):
            self.fail(
                f"{value!r} is no channel's name: 1 to 63 of a-z, 0-9 and -, of which the first is no -", param, ctx
            )
        return str(value)


_OPTIONS = (
    click.option("--channel", type=ChannelName(), required=True, help="The channel to change."),
    click.option("--reason", default="", metavar="TEXT", help="Why, for whoever reads the log."),
    click.option("--actor", metavar="TEXT", help="Who, for whoever reads the log.  [default: see above]"),
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
    from pipeline.channel_text import generation_data, served_lines

    generation = appended.generation
    if console.json:
        console.data({"changed": appended.changed, **generation_data(generation)})
        return
    verb = "serves now" if appended.changed else "serves this already"
    console.say(f"Channel {generation.channel} {verb}, as generation {generation.generation}:")
    console.result("\n".join(served_lines(generation)))
