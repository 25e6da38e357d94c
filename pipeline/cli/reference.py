"""The pages of docs/ that are made from the code.

`python -m nxpipe.pipeline.cli.reference write` makes them, `check` says which are stale.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click

from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.util import exit_codes

DOCS: Final = Path(__file__).parents[3] / "docs"
_NOTE: Final = "<!-- Made by `make docs`; change the code, not this page. -->\n\n"


def exit_codes_page() -> str:
    lines = [
        "# Exit codes\n",
        "Every command of `nxpipe` ends in one of these. A number never changes its meaning.\n",
        "| Code | Name | What happened | What to do |",
        "| ---: | --- | --- | --- |",
        *(f"| {row.number} | {row.name} | {row.meaning} | {row.way_out} |" for row in exit_codes.TABLE),
    ]
    return _NOTE + "\n".join(lines) + "\n"


def cli_page() -> str:
    """The help of every command, as a terminal shows it."""
    parts = ["# The `nxpipe` command\n"]
    for path, command in walk(cli, ("nxpipe",)):
        context = click.Context(command, info_name=" ".join(path), terminal_width=100, color=False)
        parts.append(f"{'#' * (len(path) + 1)} `{' '.join(path)}`\n\n```text\n{command.get_help(context)}\n```\n")
    return _NOTE + "\n".join(parts)


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The command and all below it, in the order of a listing."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from walk(below, (*path, name))


def _configuration_page() -> str:
    from nxpipe.pipeline.config import configuration_page

    return configuration_page()


PAGES: Final[dict[str, Callable[[], str]]] = {
    "reference/cli.md": cli_page,
    "reference/configuration.md": _configuration_page,
    "reference/exit-codes.md": exit_codes_page,
}


def stale(docs: Path = DOCS) -> list[str]:
    """The pages that differ from what the code says now."""
    return [name for name, make in PAGES.items() if not (docs / name).is_file() or (docs / name).read_text() != make()]


def main(verb: str) -> int:
    if verb == "write":
        for name, make in PAGES.items():
            (DOCS / name).write_text(make())
        return 0
    old = stale()
    if old:
        click.echo(
            f"Stale: {', '.join(f'docs/{name}' for name in old)}. Run `make docs` and commit the result.", err=True
        )
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
