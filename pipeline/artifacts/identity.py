"""Who is changing a channel: for people who read its log at night."""

import getpass
import os
import socket
import subprocess
from typing import Final

_LONGEST: Final = 256


def current_identity() -> str:
    """By the run on GitHub, else by git's configuration, else by the operating system."""
    return _plain(_from_github() or _from_git() or _from_system())


def _from_github() -> str | None:
    actor, run = os.environ.get("GITHUB_ACTOR"), os.environ.get("GITHUB_RUN_ID")
    return f"{actor} (GitHub, {os.environ.get('GITHUB_REPOSITORY')} run {run})" if actor and run else None


def _from_git() -> str | None:
    name, email = _git("user.name"), _git("user.email")
    return f"{name} <{email}>" if name and email else None


def _git(setting: str) -> str | None:
    try:
        done = subprocess.run(["git", "config", setting], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # a host without git has users all the same
    return done.stdout.strip() or None


def _from_system() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = f"uid {os.getuid()}"
    return f"{user} on {socket.gethostname()}"


def _plain(text: str) -> str:
    return "".join(each for each in text if each.isprintable())[:_LONGEST]
