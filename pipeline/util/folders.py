"""Folders of the user: where the home is, and what is kept below it. A container may run under a uid that has none."""

import os
from pathlib import Path


class NoHome(OSError):
    """Neither HOME nor the system says where the user's files are; what is only kept to save time is done without."""


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise NoHome("no home folder is known; set HOME") from error


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "nxpipe"


def user_state_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state") / "nxpipe"


def log_folder() -> Path:
    return user_state_folder() / "logs"


def expanded(path: str | Path) -> Path:
    """`~` and `~USER` as a shell takes them: where no such home is known, they are the name of a file."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of Path raises for an unknown user
