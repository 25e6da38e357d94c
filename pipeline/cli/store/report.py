"""`nxpipe store report`: the stored build report as JSON or as a page."""

import json
from pathlib import Path
from typing import Final

import click

from nxpipe.artifact_store.errors import InvalidDocument, NotFound
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import WouldOverwrite

_PAGES: Final = (".html", ".htm", ".xhtml")  # suffixes that browsers render


@click.command(cls=Command)
@click.argument("name", metavar="ARTIFACT", shell_complete=complete_artifacts)
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to FILE: a page if the name ends in .html, else the JSON document.",
)
@store_option
@config_option
@click.pass_obj
def report(console: Console, name: str, target: Path | None, store: str | None, config_path: Path) -> None:
    """Write the report of the build that published an artifact.

    ARTIFACT is a model's id, MODEL@KEY, or a key, as for `nxpipe store show`. Writes the newest report of the artifact:
    cells, workers, durations, versions.

    \b
    Example:
      nxpipe store report bert-base-uncased
      nxpipe store report bert-base-uncased@4e9ce0 --to report.html
    """
    from nxpipe.artifact_store.builds import read_report, report_timestamps

    opened = open_uncached_store(store, config_path, console)
    published = opened.resolve(name)
    timestamps = report_timestamps(opened, published.manifest_digest)
    data = read_report(opened, published.manifest_digest, timestamps[-1], "json") if timestamps else None
    if data is None:
        raise NotFound(
            f"{published.name} in {opened.url} has no build report; it was imported without one, or published by a "
            "version without reports"
        )
    text = data.decode("utf-8", "replace")
    if target is None:
        console.data_text(text)
        return
    if target.suffix.lower() in _PAGES:
        data = _page(text, f"{published.name} in {opened.url}")
    try:
        with target.open("xb") as file:
            file.write(data)
    except FileExistsError as error:
        raise WouldOverwrite(f"{target} exists already; nothing was written; pass another --to") from error
    console.say(f"  {target}: the report of the build of {timestamps[-1]}")


def _page(text: str, subject: str) -> bytes:
    """The page, rendered from the document: the stored page is unsigned, and a browser would run scripts in it."""
    from nxpipe.pipeline.build.report.document import FORMAT
    from nxpipe.pipeline.build.report.html import page

    try:
        report = json.loads(text)
        if report["format"] != FORMAT:
            raise ValueError(f"its format is {report['format']!r}, and this version reads {FORMAT!r}")
        return page(report)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidDocument(
            f"the report of {subject} cannot be shown as a page ({type(error).__name__}: {error}); "
            "pass --to FILE.json to see the document"
        ) from error
