"""Which agent the instances install: the digest that `nxpipe agent bundle` has written beside nxpipe.toml."""

import json
import re
from pathlib import Path
from typing import Final

LOCK: Final = "nxpipe.agent.lock"


class NoAgentLocked(Exception):
    """Instances would not know what to install."""

    def __init__(self, path: Path, fault: str) -> None:
        super().__init__(
            f"{path} {fault}, and names the agent that instances install; run: nxpipe agent bundle PACKAGES"
        )


def locked_agent(folder: Path) -> str | None:
    """None: not locked yet."""
    path = folder / LOCK
    try:
        found = json.loads(path.read_text())["sha256"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise NoAgentLocked(path, "cannot be read") from error
    if not isinstance(found, str) or not re.fullmatch("[0-9a-f]{64}", found):
        raise NoAgentLocked(path, "names no digest")
    return found
