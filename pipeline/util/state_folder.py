"""Where this machine keeps what builds and releases leave behind: beside nxpipe.toml, and out of its repository."""

from pathlib import Path
from typing import Final

NAME: Final = ".nxpipe"


def state_folder(config_path: Path) -> Path:
    return config_path.parent / NAME
