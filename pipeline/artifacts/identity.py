"""The identity that a channel's log records for a change."""

import getpass
import os
import socket
import subprocess
from typing import Final

_MAX_LENGTH: Final = 256


def current_identity() -> str:
    """The actor of the GitHub run, else the git user, else the user of the operating system."""
    return _plain(_from_github() or _from_git() or _from_system())


def _from_github() -> str | None:
    actor, run = os.environ.get("GITHUB_ACTOR"), os.environ.get("GITHUB_RUN_ID")
    return f"{actor} (GitHub, {os.environ.get('GITHUB_REPOSITORY')} run {run})" if actor and run else None


def _from_git() -> str | None:
    name, email = _git("user.name"), _git("user.email")
    return f"{name} <{email}>" if name and email else None


def _git(setting: str) -> str | None:
    try:
        result = subprocess.run(["git", "config", setting], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # no git on this host
    return result.stdout.strip() or None


def _from_system() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a uid without a name
        user = f"uid {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def _plain(text: str) -> str:
    return "".join(char for char in text if char.isprintable())[:_MAX_LENGTH]
