"""`nxpipe channel log` and `nxpipe channel show`."""

from pathlib import Path

import click

from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.main import Command, Group
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console


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
