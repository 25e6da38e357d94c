"""Values first, as variables of the shell, and then scripts as they are in their files."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Final

_FOLDER: Final = Path(__file__).parent
LARGEST: Final = 16 * 1024  # bytes that EC2 takes


class TooLong(Exception):
    """User data that EC2 would refuse."""

    def __init__(self, size: int) -> None:
        super().__init__(
            f"the user data has {size} bytes, and EC2 takes {LARGEST}; shorten the fleet's command, or put its words "
            "into a script of the AMI"
        )


def script(values: Mapping[str, str], files: Mapping[str, str], *parts: str) -> str:
    """Each part is the name of a file beside this one; `files` are written before the parts run, by their paths. What
    is given may hold references that CloudFormation resolves.
    """
    head = ["#!/usr/bin/env bash", "set -Eeuo pipefail", *(f"{name}={quote(values[name])}" for name in values), ""]
    writing = [f"put {quote(path)} {quote(files[path])}" for path in files]
    text = "\n".join([*head, part_text("begin"), *writing, "", *map(part_text, parts)])
    if (size := len(text.encode())) > LARGEST:
        raise TooLong(size)
    return text


def part_text(part: str) -> str:
    return (_FOLDER / f"{part}.sh").read_text()
