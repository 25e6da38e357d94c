"""Which store a command means: what was typed, else the environment, else nxpipe.toml, else a folder beside it."""

import os
from pathlib import Path

VARIABLE = "NXPIPE_STORE_URL"


def store_url(option: str | None, config_path: Path) -> str:
    """A relative folder of the file starts at the file; one that was typed, or set in the environment, where we are."""
    typed = option or os.environ.get(VARIABLE)
    if typed:
        return typed
    from artifact_store.url import anchored
    from pipeline.config import load_config

    return anchored(load_config(config_path, os.environ, missing_ok=True).store.url, config_path.parent)
