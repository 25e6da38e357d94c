"""The store that is looked after: its own objects, not what a cache or a replica would give in their place."""

from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.pipeline.cli.store_url import open_the_store
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store


def open_the_store_itself(option: str | None, config_path: Path, console: Console) -> "Store":
    from nxpipe.artifact_store import Store

    return Store(open_the_store(option, config_path, console).backend)
