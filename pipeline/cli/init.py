"""`nxpipe init`: everything that a repository needs to release models, written at once or not at all."""

from pathlib import Path
from typing import get_args

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.config import Model, field_help
from nxpipe.pipeline.config.models import Task
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.option(
    "--model-id", metavar="ID|FOLDER", default="bert-base-uncased", show_default=True, help="The first model."
)
@click.option(
    "--task",
    type=click.Choice(get_args(Task)),
    help=f"{field_help(Model, 'task')}  [default: that of the public model, else feature-extraction]",
)
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff and write nothing.")
@click.pass_obj
def init(console: Console, directory: Path, model_id: str, task: str | None, dry_run: bool) -> None:
    """Write nxpipe.toml and a release workflow into a repository.

    The local store is kept out of git by a line in .gitignore. No file of yours is overwritten: if one
    stands in the way, nothing is written.

    \b
    Example:
      nxpipe init --dry-run
      nxpipe init . --model-id HuggingFaceTB/SmolLM2-135M
    """
    from nxpipe.pipeline.templates.repository import diff, plan, refuse_links_out, refuse_to_overwrite, write

    planned = plan(directory, model_id, task)
    refuse_links_out(planned)
    if dry_run:
        text = "".join(map(diff, planned))
        if console.json:
            console.data({"diff": text})
        else:
            console.page(text)
        return
    refuse_to_overwrite(planned)
    write(planned)
    written = [str(change.path) for change in planned]
    if console.json:
        console.data({"written": written})
    else:
        console.result(*(f"wrote {path}" for path in written))
        console.say("Next: nxpipe config check, then nxpipe build.")
