"""`nxpipe store report`."""

from pathlib import Path

import click

from artifact_store.errors import NotFound
from pipeline.cli import Command
from pipeline.command_line.options import config_option, store_option
from pipeline.command_line.output import Console
from pipeline.commands.store.itself import open_the_store_itself
from pipeline.errors import WouldOverwrite


@click.command(cls=Command)
@click.argument("name")
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it there instead: what ends in .html is the page, all else the JSON document.",
)
@store_option
@config_option
@click.pass_obj
def report(console: Console, name: str, target: Path | None, store: str | None, config_path: Path) -> None:
    """Write the report of the build that made an artifact.

    NAME is a model's id, MODEL@KEY, or a key, as for `nxpipe store show`. Of the reports that are kept beside the
    artifact it is the newest: which cells were built by whom, how long each took, with which versions.

    \b
    Example:
      nxpipe store report bert-base-uncased
      nxpipe store report bert-base-uncased@4e9ce0 --to report.html
    """
    from artifact_store.reports import moments_of, read_report

    opened = open_the_store_itself(store, config_path, console)
    published = opened.resolve(name)
    moments = moments_of(opened, published.manifest_digest)
    kind = "html" if target is not None and target.suffix == ".html" else "json"
    data = read_report(opened, published.manifest_digest, moments[-1], kind) if moments else None
    if data is None:
        raise NotFound(
            f"no report of a build is kept beside {published.name} in {opened.url}; "
            "it was published before reports were, or brought here without one"
        )
    if target is None:
        console.page(data.decode())
        return
    try:
        with target.open("xb") as file:
            file.write(data)
    except FileExistsError as error:
        raise WouldOverwrite(f"{target} exists already, so nothing was written; pass another --to") from error
    console.say(f"  {target}: the report of the build of {moments[-1]}")
