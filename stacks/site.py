"""What the stacks of a project have in common: the file that describes them, and the two on which all others stand."""

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aws_cdk import App, Environment

from nxpipe.pipeline.config import Config
from nxpipe.stacks.handles import NetworkHandle, StoreHandle


@dataclass(frozen=True)
class Site:
    app: App
    config: Config
    folder: Path  # of nxpipe.toml, where relative paths of it start
    env: Environment
    store: StoreHandle
    network: NetworkHandle

    @property
    def project(self) -> str:
        return self.config.project.name

    @property
    def prefix(self) -> str:
        return store_prefix(self.config)


def store_prefix(config: Config) -> str:
    """Where the store lies in its bucket, as the keys of objects begin: "" or "models/", say."""
    url = urlsplit(config.store.url)
    folder = url.path.strip("/") if url.scheme == "s3" else ""
    return f"{folder}/" if folder else ""
