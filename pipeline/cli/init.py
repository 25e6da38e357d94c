"""`nxpipe init`: an nxpipe.toml, a release workflow and a .gitignore entry, written all together or not at all.

The comments of the configuration are the descriptions of its fields.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Template
from textwrap import fill
from typing import Final, get_args

import click
from pydantic import ValidationError

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.config import Config, Model, field_help
from nxpipe.pipeline.config.messages import violations
from nxpipe.pipeline.config.models import Task
from nxpipe.pipeline.config.reference import tables
from nxpipe.pipeline.models.catalogue import find
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import ModelSourceError, WouldOverwrite
from nxpipe.pipeline.util.files import NAME, expanded
from nxpipe.pipeline.util.text import for_json

_TEMPLATES: Final = Path(__file__).parents[1] / "templates"
_ACKNOWLEDGED: Final = timedelta(days=180)
_ANY_MODEL: Final = "feature-extraction"  # compiles for every model


class _Text(Template):
    """A template whose placeholders may name a field: ${store.url} is the description of that field."""

    idpattern = "[a-z_]+(?:[.][a-z_]+)?"


def configuration(root: Path, model_id: str, task: str | None) -> str:
    """The text of a valid configuration with one model."""
    folder = expanded(model_id)
    source = "path" if folder.is_dir() else "id"
    last = (folder.resolve().name if folder.is_dir() else model_id).rpartition("/")[2]
    values = {
        "name": _slug(root.resolve().name, "project"),
        "model_name": _slug(last, "model"),
        "model": Path(os.path.relpath(folder, root)).as_posix() if folder.is_dir() else model_id,
        "task": task or _task_of(model_id, folder),
    }
    comments = _comments()
    comments["models.source"] = comments[f"models.{source}"]
    values["fleet_stack"] = f"{values['name']}-serve-{values['model_name']}*"
    quoted = {key: for_json(value) for key, value in values.items()}
    until = datetime.now(UTC).date() + _ACKNOWLEDGED
    template = _Text((_TEMPLATES / "nxpipe.toml").read_text(encoding="utf-8"))
    text = template.substitute(quoted, source=source, until=until, **comments)
    _require_valid(text, model_id)
    return text


def _slug(text: str, default: str) -> str:
    """The text as a valid name, as similar as possible."""
    words = re.sub("[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return words[:40].strip("-") or default


def _task_of(model_id: str, folder: Path) -> str:
    if folder.is_dir():
        return resolve(str(folder)).task
    known = find(model_id)
    return known.task if known is not None and known.task in get_args(Task) else _ANY_MODEL


def _comments() -> dict[str, str]:
    return {
        f"{path[0]}.{key}": fill(field.description or "", 118, subsequent_indent="# ")
        for path, _, table in tables(Config)
        if len(path) == 1
        for key, field in table.model_fields.items()
    }


def _require_valid(text: str, model_id: str) -> None:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # a lone surrogate, for example
        raise ModelSourceError(f"{model_id!r} cannot be written into a configuration: {error}") from error
    try:
        Config.model_validate(document)
    except ValidationError as error:
        violation = next(violations(error, Config))
        raise ModelSourceError(
            f"{model_id!r} cannot be used: found {violation.found}, expected {violation.allowed}"
        ) from error


_GITHUB: Final = {
    ".github/workflows/nxpipe-release.yml": _TEMPLATES / "nxpipe-release.yml",
    ".github/actions/nxpipe/action.yml": _TEMPLATES / "nxpipe/action.yml",
}
_STATE: Final = f"{NAME}/"  # the local store and its cache


@dataclass(frozen=True)
class Change:
    """One file before (None: absent) and after. Bytes that are not UTF-8 survive in both."""

    root: Path
    name: str
    before: str | None
    after: str
    amends: bool = False  # extends a file that may exist; any other change creates a file

    @property
    def path(self) -> Path:
        return self.root / self.name


def plan(root: Path, model_id: str, task: str | None) -> tuple[Change, ...]:
    """All files that a repository needs to release one model."""
    ignored = _read(root / ".gitignore")
    changes = (
        Change(root, "nxpipe.toml", _read(root / "nxpipe.toml"), configuration(root, model_id, task)),
        *(Change(root, name, _read(root / name), file.read_text(encoding="utf-8")) for name, file in _GITHUB.items()),
        Change(root, ".gitignore", ignored, _with_state_folder(ignored or ""), amends=True),
    )
    return tuple(change for change in changes if not (change.amends and change.before == change.after))


def _read(path: Path) -> str | None:
    """The text of the file; empty for a folder or a broken link, which also block a new file."""
    if path.is_file():
        return path.read_bytes().decode("utf-8", "surrogateescape")
    return "" if os.path.lexists(path) else None


def _with_state_folder(text: str) -> str:
    """The text of .gitignore with one entry for the state folder."""
    if any(line.strip().strip("/") == _STATE.strip("/") for line in text.splitlines()):
        return text
    newline = "\r\n" if "\r\n" in text else "\n"
    return text + (newline if text and not text.endswith("\n") else "") + _STATE + newline


def diff(change: Change) -> str:
    """The change as a unified diff for `git apply`."""
    old = "/dev/null" if change.before is None else f"a/{change.name}"
    before, after = ((text or "").splitlines(keepends=True) for text in (change.before, change.after))
    lines = difflib.unified_diff(before, after, old, f"b/{change.name}")
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text.encode("utf-8", "backslashreplace").decode()


def require_inside(changes: Sequence[Change]) -> None:
    """Raise if a file would be read or written outside of the repository."""
    for change in changes:
        root, target = (Path(os.path.realpath(path)) for path in (change.root, change.path))
        if not target.is_relative_to(root):
            raise WouldOverwrite(
                f"{change.path} is a link to {target}, outside of {root}; nothing was written; replace the link by a "
                "folder or file of the repository"
            )


def require_absent(changes: Sequence[Change]) -> None:
    """Raise if a new file would replace an existing one."""
    existing = [str(change.path) for change in changes if change.before is not None and not change.amends]
    if existing:
        raise WouldOverwrite(
            f"{' and '.join(existing)} {'exists' if len(existing) == 1 else 'exist'} already; nothing was written; "
            "move the file away, or see the difference with --dry-run"
        )


def write(changes: Sequence[Change]) -> None:
    """Apply all changes, or restore the repository."""
    with ExitStack() as undo, ExitStack() as staging:
        staged = [(change, _stage(change, undo, staging)) for change in changes]
        for change, file in staged:
            undo.callback(_restore, change)
            file.replace(change.path)
        undo.pop_all()  # success: nothing is undone


def _stage(change: Change, undo: ExitStack, staging: ExitStack) -> Path:
    """Write the new text beside its destination: a full disk fails before any file changes."""
    for folder in _missing_folders(change.path.parent):
        folder.mkdir()
        undo.callback(folder.rmdir)
    file = change.path.with_name(f".{change.path.name}.{os.getpid()}.new")
    file.touch(exist_ok=False)  # never through an existing link
    staging.callback(file.unlink, missing_ok=True)
    file.write_bytes(change.after.encode("utf-8", "surrogateescape"))
    return file


def _missing_folders(folder: Path) -> Iterator[Path]:
    """The folders that do not exist, the outermost first."""
    if not folder.exists():
        yield from _missing_folders(folder.parent)
        yield folder


def _restore(change: Change) -> None:
    if change.before is None:
        change.path.unlink(missing_ok=True)
    else:
        change.path.write_bytes(change.before.encode("utf-8", "surrogateescape"))


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

    A line in .gitignore keeps the local store out of git. Existing files are never overwritten: if one of the new
    files exists already, nothing is written.

    \b
    Example:
      nxpipe init --dry-run
      nxpipe init . --model-id HuggingFaceTB/SmolLM2-135M
    """
    planned = plan(directory, model_id, task)
    require_inside(planned)
    if dry_run:
        text = "".join(map(diff, planned))
        if console.json:
            console.data({"diff": text})
        else:
            console.page(text)
        return
    require_absent(planned)
    write(planned)
    written = [str(change.path) for change in planned]
    if console.json:
        console.data({"written": written})
    else:
        console.result(*(f"wrote {path}" for path in written))
        console.say("Next: nxpipe config check, then nxpipe build.")
