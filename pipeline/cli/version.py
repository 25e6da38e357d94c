"""`nxpipe version`: the versions of nxpipe, its backends and libraries."""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

import click

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.cli.doctor import LIBRARIES
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.compile.neuronx.compiler import compiler_release
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table


@click.command(cls=Command)
@click.pass_obj
def version(console: Console) -> None:
    """Print the versions of nxpipe, its backends and libraries.

    \b
    Example:
      nxpipe version --json
    """
    components = versions()
    if console.json:
        console.data(components)
    else:
        console.page(
            table(("component", "version"), [(name, text or "not installed") for name, text in components.items()])
        )


def versions() -> dict[str, str | None]:
    """The version of every component, None if it is not installed. Imports none of them."""
    return {
        "nxpipe": VERSION,
        "backend emulator": VERSION,
        "backend neuronx": compiler_release(),
        "python": platform.python_version(),
        **{name: _installed(name) for name in LIBRARIES},
    }


def _installed(name: str) -> str | None:
    try:
        return installed(name)
    except PackageNotFoundError:
        return None
