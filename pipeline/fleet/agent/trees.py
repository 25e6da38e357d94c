"""File trees of a contract on an instance: laid out read-only for the server, its environment without compilers, and
the proof in its log that nothing was compiled.

A runtime that misses one file may compile for an hour and write over what was fetched. So the files that the server
sees cannot be written by another user than root, are checked whole before the start, and can be checked again; no
compiler answers on PATH; and one line of the log is enough to know. Root can write to any file: for a server that runs
as root the digests of `require_unchanged` decide, and not the modes.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.fetch.folder import SERVING, note_again, verified
from nxpipe.pipeline.artifacts.contract import COMPILERS, FileTree, ServingContract, TreeFile
from nxpipe.pipeline.fleet.monitor.source import Compilers
from nxpipe.pipeline.util.errors import NotReady

_FOLDER_MODE: Final = 0o555
_FILE_MODE: Final = 0o444
_REFUSALS: Final = "no-compilers"  # below the root: programs in place of the compilers
REFUSED: Final = "nxpipe: a compiler was called on a serving instance"
_REFUSAL: Final = f"#!/bin/sh\necho '{REFUSED}: '\"$0 $*\" >&2\nexit 70\n"


@dataclass
class LaidOut:
    """The trees of a contract on this machine. `places` has the folder of each tree by its name."""

    contract: ServingContract
    root: Path
    places: Mapping[str, str]
    _stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def argv(self) -> tuple[str, ...]:
        """The server's command; empty if the fleet's command is to be used."""
        return tuple(self.contract.substituted(text, self.places) for text in self.contract.argv)

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """The server's environment: `base`, the contract's variables, and PATH with refusals before any compiler.

        NotReady for a forbidden variable. A compiler often lies beside the server's own programs, so its folder stays
        on PATH, and programs of the same names that fail with one sentence come first.
        """
        for name in self.contract.forbidden:
            if name in base:
                raise NotReady(
                    f"{name} is set for the server, and contract {self.contract.name} forbids it: with it "
                    f"{self.contract.runtime} compiles, or loads other programs; remove it from the environment"
                )
        fixed = {name: self.contract.substituted(text, self.places) for name, text in self.contract.environment.items()}
        path = os.pathsep.join([str(self.root / _REFUSALS), base.get("PATH", os.defpath)])
        return {**base, **fixed, "PATH": path}

    def require_unchanged(self) -> None:
        """Raise NotReady naming the first file that was added, lost or changed since the import.

        A file whose inode, size and times are those of the last check is not read again; only the kernel sets the
        change time.
        """
        for tree in self.contract.trees:
            folder = Path(self.places[tree.name])
            files = {file.path: file for file in tree.files}
            found = set(_paths(folder))
            for path in sorted(files.keys() - found):
                raise self._changed(folder / path, "is gone")
            for path in sorted(path for path in found - files.keys() if not tree.may_have(path)):
                raise self._changed(folder / path, "was written by the server or another process")
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda file: self._require_content(folder / file.path, file), tree.files))  # noqa: B023

    def adopt(self, path: Path) -> None:
        """Take a file as checked, of which the caller knows that its bytes are right."""
        if (stamp := _stamp(path)) is not None:
            self._stamps[path] = stamp

    def _require_content(self, path: Path, file: TreeFile) -> None:
        stamp = _stamp(path)
        if stamp is not None and self._stamps.get(path) == stamp:
            return
        if stamp is None or _sha256(path) != file.sha256:
            raise self._changed(path, "has other bytes than were imported")
        self._stamps[path] = stamp

    def _changed(self, path: Path, how: str) -> NotReady:
        return NotReady(
            f"{path} {how}, so {self.contract.runtime} may serve what was not verified; replace the instance, or fetch "
            "the artifact again"
        )


def lay_out(contract: ServingContract, fetched_folder: Path, root: Path, port: int = 8080) -> LaidOut:
    """Lay out a contract's trees from a fetched folder below `root`, or at the absolute path that the runtime demands,
    in place of an earlier layout. Files are hard links where possible, else copies; files have mode 0444 and folders
    0555. NotReady names a file that is missing or has another size or content.

    What the fetch verified in this boot, and what is a link to it, is not read again: its digests and those of the
    contract come from one manifest. A link changes the file's status, so the folder's notes are renewed.
    """
    root, source = root.absolute(), fetched_folder / SERVING / contract.name
    known = verified(fetched_folder)
    for tree in contract.trees:
        _require_files(tree, source / tree.name)
    places = {"port": str(port), "artifact_folder": str(fetched_folder.absolute())}
    places |= {tree.name: str(root / tree.destination) for tree in contract.trees}
    laid_out = LaidOut(contract, root, places)
    try:
        _require_layout(root)
        remove_tree(root)
        _write_refusals(root / _REFUSALS)
        for tree in contract.trees:
            folder = root / tree.destination
            if not folder.is_relative_to(root):
                _require_ours(folder, tree)
                remove_tree(folder)
            _place(tree, source / tree.name, folder)
            for file in tree.files:
                fetched = f"{SERVING}/{contract.name}/{tree.name}/{file.path}"
                if fetched in known and (folder / file.path).samefile(fetched_folder / fetched):
                    laid_out.adopt(folder / file.path)
        note_again(fetched_folder, known)
    except OSError as failed:
        raise NotReady(
            f"{failed.filename or root} cannot be laid out ({failed.strerror}); free space, or correct the permissions"
        ) from failed
    laid_out.require_unchanged()
    return laid_out


def require_relative(*contracts: ServingContract | None) -> None:
    """Raise NotReady if a runtime has the path of a tree compiled in: there two versions have no place side by side."""
    for contract in filter(None, contracts):
        for tree in contract.trees:
            if Path(tree.destination).is_absolute():
                raise NotReady(
                    f"tree {tree.name} of contract {contract.name} belongs at {tree.destination}, where the files of "
                    'the running server are or would be; set updates.policy = "replace" for this fleet'
                )


def _require_files(tree: FileTree, folder: Path) -> None:
    for file in tree.files:
        path = folder / file.path
        status = _status(path)
        if status is None or not stat.S_ISREG(status.st_mode):
            raise NotReady(f"{path} is missing, and the runtime would compile without it; fetch the artifact again")
        if status.st_size != file.size:
            raise NotReady(f"{path} has {status.st_size} bytes instead of {file.size}; fetch the artifact again")


def _require_layout(root: Path) -> None:
    """Refuse to replace a folder that is no earlier layout."""
    if root.exists() and any(root.iterdir()) and not (root / _REFUSALS).is_dir():
        raise NotReady(f"{root} holds files that are no trees of a contract; name a new or an empty folder")


def _require_ours(folder: Path, tree: FileTree) -> None:
    """Refuse to replace a folder with files of others: an absolute path may be shared with another server."""
    known = {file.path for file in tree.files}
    for path in _paths(folder):
        if path not in known and not tree.may_have(path):
            raise NotReady(
                f"{folder / path} is not of this contract, and the runtime needs {folder} for its tree {tree.name}; "
                "move it away, or use an AMI without it"
            )


def _place(tree: FileTree, source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in tree.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(source / file.path)
        except OSError:  # on another file system, or of another user
            shutil.copyfile(source / file.path, target)
        target.chmod(_FILE_MODE)
    for below in {folder, *(parent for file in tree.files for parent in _folders(folder, file.path))}:
        below.chmod(_FOLDER_MODE)


def _folders(folder: Path, path: str) -> Iterator[Path]:
    parts = path.split("/")
    return (folder / Path(*parts[:depth]) for depth in range(1, len(parts)))


def _write_refusals(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in COMPILERS:
        (folder / name).write_text(_REFUSAL)
        (folder / name).chmod(_FOLDER_MODE)
    folder.chmod(_FOLDER_MODE)


def remove_tree(folder: Path) -> None:
    """Remove a layout, whose folders are read-only, or another folder; nothing if there is none."""
    if not folder.is_dir():
        return
    for below, _, _ in os.walk(folder):
        Path(below).chmod(0o700)  # before os.walk lists it
    shutil.rmtree(folder)


def _paths(folder: Path) -> Iterator[str]:
    """Everything below a folder that is no folder, links included."""
    for below, folders, names in os.walk(folder):
        links = [name for name in folders if Path(below, name).is_symlink()]
        for name in (*names, *links):
            yield Path(below, name).relative_to(folder).as_posix()


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.lstat()
    return None


def _stamp(path: Path) -> tuple[int, ...] | None:
    status = _status(path)
    if status is None or not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


class ProofOfNoCompile:
    """What the server's log and the processes of the machine say about compilation, while it starts and serves.

    The agent passes each line of the server's output to `line`. `fault` answers at any time; `unproven` once the
    server is ready.
    """

    def __init__(self, contract: ServingContract, compilers: Compilers | None = None) -> None:
        self._contract = contract
        self._compilers = compilers or Compilers(Path("/proc"))
        self._awaited = {text: re.compile(text) for text in contract.proves}
        self._disproves = [re.compile(text) for text in (re.escape(REFUSED), *contract.disproves)]
        self._fault: str | None = None

    def line(self, text: str) -> None:
        for pattern, compiled in list(self._awaited.items()):
            if compiled.search(text):
                self._awaited.pop(pattern, None)
        if self._fault is None and any(pattern.search(text) for pattern in self._disproves):
            self._fault = (
                f"the server compiles instead of loading what was compiled: {' '.join(text.split())[:200]!r}; compare "
                f"its versions and flags with contract {self._contract.name}"
            )

    def fault(self) -> str | None:
        """The first sign of a compilation; None without one."""
        if self._fault is None and self._compilers.begun():
            self._fault = (
                f"a compiler ({' or '.join(COMPILERS)}) runs on this instance, which only loads programs; compare the "
                f"server's versions and flags with contract {self._contract.name}"
            )
        return self._fault

    def unproven(self) -> str | None:
        """The first line that a ready server must have written and has not; None if there is none."""
        missing = next(iter(self._awaited), None)
        if missing is None:
            return None
        return (
            f"the server is ready, but its log has no line with {missing!r}, which {self._contract.runtime} writes "
            "when it loads what was compiled; raise its log level to INFO, or compare its version with the contract"
        )
