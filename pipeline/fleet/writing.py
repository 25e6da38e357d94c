"""Files that commands write for people to commit: whole or not at all, and never over what somebody else wrote."""

from collections.abc import Mapping
from pathlib import Path

from nxpipe.pipeline.util.errors import WouldOverwrite
from nxpipe.pipeline.util.files import write_whole


def write_all(folder: Path, files: Mapping[str, str], head: str) -> None:
    """`head` is the line by which a file is known as ours; ours that are not among the files any more go."""
    folder.mkdir(parents=True, exist_ok=True)
    there = {path.name: path for path in folder.iterdir() if path.is_file()}
    ours = {name for name, path in there.items() if path.read_bytes().startswith(head.encode())}
    if foreign := sorted(files.keys() & there.keys() - ours):
        raise WouldOverwrite(
            f"{folder / foreign[0]} was not written by this command; move it away, or pass another --out"
        )
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    for stale in sorted(ours - files.keys()):
        there[stale].unlink()
