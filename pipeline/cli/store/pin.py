"""`nxpipe store pin` and `nxpipe store unpin`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.artifacts.actor import current_actor
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import REASON, Label, config_option, store_option
from nxpipe.pipeline.cli.store.itself import open_the_store_itself
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.artifact_store.pins import Pin


@click.command(cls=Command)
@click.argument("name", required=False)
@click.option("--as", "pin_name", type=Label("pin"), metavar="PIN", help="The pin's name: 1 to 63 of a-z, 0-9 and '-'.")
@click.option("--reason", type=REASON, default="", help="Why, for those who find the pin later.")
@store_option
@config_option
@click.pass_obj
def pin(
    console: Console, name: str | None, pin_name: str | None, reason: str, store: str | None, config_path: Path
) -> None:
    """Keep an artifact from being collected, or list the pins.

    NAME is a model's id, MODEL@KEY, or a key, as for `nxpipe store show`. Without it, every pin is listed.

    \b
    Example:
      nxpipe store pin bert-base-uncased@4e9ce0 --as audit-2026 --reason "figures of the paper"
      nxpipe store pin
    """
    from nxpipe.artifact_store.pins import Pins

    if (name is None) != (pin_name is None):
        raise click.UsageError("NAME and --as PIN go together; without both, the pins are listed")
    opened = open_the_store_itself(store, config_path, console)
    pins = Pins(opened.backend)
    if name is not None and pin_name is not None:
        published = opened.resolve(name)
        found = [pins.add(pin_name, published.record.manifest, actor=current_actor(), reason=reason)]
    else:
        found = pins.all()
    if console.json:
        console.data([one.model_dump(mode="json") for one in found])
    elif found:
        console.page(table(("pin", "manifest", "expires", "by", "reason"), [_row(one) for one in found]))
    else:
        console.say(f"{opened.url} has no pins.")


@click.command(cls=Command)
@click.argument("pin_name", type=Label("pin"), metavar="PIN")
@store_option
@config_option
@click.pass_obj
def unpin(console: Console, pin_name: str, store: str | None, config_path: Path) -> None:
    """Remove a pin; a later collection may take what it kept.

    \b
    Example:
      nxpipe store unpin audit-2026
    """
    from nxpipe.artifact_store.pins import Pins

    opened = open_the_store_itself(store, config_path, console)
    Pins(opened.backend).remove(pin_name)
    if console.json:
        console.data({"removed": pin_name})
    else:
        console.say(f"Removed pin {pin_name} of {opened.url}.")


def _row(one: "Pin") -> tuple[str, ...]:
    from nxpipe.artifact_store.names import SHOWN

    return one.name, one.manifest.sha256[:SHOWN], (one.expires_at or "never")[:16], one.actor, one.reason
