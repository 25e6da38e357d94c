"""What `nxpipe init` changes in a repository: planned as data, shown as a diff, or carried out as a whole."""

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nxpipe.pipeline.templates.configuration import configuration
from nxpipe.pipeline.util.errors import WouldOverwrite
from nxpipe.pipeline.util.files import NAME

_HERE: Final = Path(__file__).parent
_GITHUB: Final = {
    ".github/workflows/nxpipe-release.yml": _HERE / "nxpipe-release.yml",
    ".github/actions/nxpipe/action.yml": _HERE / "nxpipe/action.yml",
}
_STATE: Final = f"{NAME}/"  # the local store and its cache


@dataclass(frozen=True)
class Change:
    """One file as it is (None: it is not there) and as it will be. Bytes that are no UTF-8 survive in both."""

    root: Path
    name: str
    before: str | None
    after: str
    amends: bool = False  # adds to a file that may be there; any other change makes a file

    @property
    def path(self) -> Path:
        return self.root / self.name


def plan(root: Path, model_id: str, task: str | None) -> tuple[Change, ...]:
    """Everything that a repository needs to release one model."""
    ignored = _read(root / ".gitignore")
    changes = (
        Change(root, "nxpipe.toml", _read(root / "nxpipe.toml"), configuration(root, model_id, task)),
        *(Change(root, name, _read(root / name), file.read_text(encoding="utf-8")) for name, file in _GITHUB.items()),
        Change(root, ".gitignore", ignored, _ignoring(ignored or ""), amends=True),
    )
    return tuple(change for change in changes if not (change.amends and change.before == change.after))


def _read(path: Path) -> str | None:
    """What is there; a folder or a link that leads nowhere is in the way as well, and has no text."""
    if path.is_file():
        return path.read_bytes().decode("utf-8", "surrogateescape")
    return "" if os.path.lexists(path) else None


def _ignoring(text: str) -> str:
    """The text of a .gitignore with our entry in it, once."""
    if any(line.strip().strip("/") == _STATE.strip("/") for line in text.splitlines()):
        return text
    newline = "\r\n" if "\r\n" in text else "\n"
    return text + (newline if text and not text.endswith("\n") else "") + _STATE + newline


def diff(change: Change) -> str:
    """The change as `git apply` takes it."""
    old = "/dev/null" if change.before is None else f"a/{change.name}"
    before, after = ((text or "").splitlines(keepends=True) for text in (change.before, change.after))
    lines = difflib.unified_diff(before, after, old, f"b/{change.name}")
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text.encode("utf-8", "backslashreplace").decode()


def refuse_links_out(changes: Sequence[Change]) -> None:
    """Raise if a file would be read or written outside of the repository."""
    for change in changes:
        home, there = (Path(os.path.realpath(path)) for path in (change.root, change.path))
        if not there.is_relative_to(home):
            raise WouldOverwrite(
                f"{change.path} leads out of {home}, to {there}, so nothing was written; replace the link by a folder "
                "or a file of the repository's own"
            )


def refuse_to_overwrite(changes: Sequence[Change]) -> None:
    """Raise if a file of the user's stands where a new one would go."""
    standing = [str(change.path) for change in changes if change.before is not None and not change.amends]
    if standing:
        raise WouldOverwrite(
            f"{' and '.join(standing)} {'exists' if len(standing) == 1 else 'exist'} already, so nothing was written; "
            "move what is there away, or look at the difference with --dry-run"
        )


def write(changes: Sequence[Change]) -> None:
    """Carry out all changes, or leave the repository as it was."""
    with ExitStack() as undo, ExitStack() as staging:
        staged = [(change, _stage(change, undo, staging)) for change in changes]
        for change, file in staged:
            undo.callback(_put_back, change)
            file.replace(change.path)
        undo.pop_all()  # all is done: nothing is taken back


def _stage(change: Change, undo: ExitStack, staging: ExitStack) -> Path:
    """The new text in a file beside its place, so that a full disk is met before anything is changed."""
    for folder in _missing_folders(change.path.parent):
        folder.mkdir()
        undo.callback(folder.rmdir)
    file = change.path.with_name(f".{change.path.name}.{os.getpid()}.new")
    file.touch(exist_ok=False)  # never through a link that waits there
    staging.callback(file.unlink, missing_ok=True)
    file.write_bytes(change.after.encode("utf-8", "surrogateescape"))
    return file


def _missing_folders(folder: Path) -> Iterator[Path]:
    """From the outermost to the innermost."""
    if not folder.exists():
        yield from _missing_folders(folder.parent)
        yield folder


def _put_back(change: Change) -> None:
    if change.before is None:
        change.path.unlink(missing_ok=True)
    else:
        change.path.write_bytes(change.before.encode("utf-8", "surrogateescape"))
