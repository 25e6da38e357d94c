"""`nxpipe completion`: completion scripts for shells."""

import click
from click.shell_completion import get_completion_class

from nxpipe.pipeline.cli.main import Command, cli
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_obj
def completion(console: Console, shell: str) -> None:
    """Print a shell completion script.

    Source it in the start-up file of SHELL, or save it where the shell loads completions from.

    \b
    Example:
      nxpipe completion bash > ~/.local/share/bash-completion/completions/nxpipe
    """
    kind = get_completion_class(shell)
    assert kind is not None
    console.page(kind(cli, {}, "nxpipe", "_NXPIPE_COMPLETE").source())
