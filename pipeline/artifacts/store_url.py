"""Store of a command: --store, else NXPIPE_STORE_URL, else nxpipe.toml, else a folder beside it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.files import expanded

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
    from nxpipe.pipeline.config.store import Store as Section


VARIABLE = "NXPIPE_STORE_URL"


def store_url(option: str | None, config_path: Path) -> str:
    """The URL of the store. A relative path in nxpipe.toml starts at that file's folder, any other at the working
    directory."""
    typed = _typed(option)
    if typed is not None:
        return typed
    from nxpipe.artifact_store.url import anchored

    return anchored(_section(config_path).url, config_path.parent)


def open_configured_store(option: str | None, config_path: Path, console: "Console") -> "Store":
    """The store, read through this machine's cache, and from its replicas if it fails.

    Replicas and the KMS key are those of the store in nxpipe.toml: a store from --store has neither.
    """
    from nxpipe.artifact_store.url import anchored, is_remote, open_store

    url = store_url(option, config_path)
    if _typed(option) is not None and not is_remote(url):
        return open_store(url)
    section = _section(config_path)
    if url != anchored(section.url, config_path.parent):
        return open_store(url, cache=_cache(section, config_path), cache_limit=section.cache_limit)
    return open_store(
        url,
        mirrors=[anchored(mirror, config_path.parent) for mirror in section.endpoints],
        cache=_cache(section, config_path),
        cache_limit=section.cache_limit,
        kms_key=section.kms_key,
        notice=console.say,
    )


def open_offline_store(option: str | None, config_path: Path) -> "Store":
    """The store without network access: this machine's cache, or a local folder."""
    from nxpipe.artifact_store.url import is_remote, open_offline, open_store

    url = store_url(option, config_path)
    if not is_remote(url):
        return open_store(url)
    section = _section(config_path)
    return open_offline(url, _cache(section, config_path), section.cache_limit)


def offline_index(option: str | None, config_path: Path) -> "OfflineIndex | None":
    """This machine's index of a remote store; None for a local folder."""
    from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
    from nxpipe.artifact_store.url import is_remote

    url = store_url(option, config_path)
    return OfflineIndex(_cache(_section(config_path), config_path), url) if is_remote(url) else None


def _typed(option: str | None) -> str | None:
    """--store or the environment. An empty --store counts: an unset shell variable must not select another store."""
    return option if option is not None else os.environ.get(VARIABLE) or None


def _section(config_path: Path) -> "Section":
    """[store] of nxpipe.toml, without the URL of the environment, so that its other keys match its own URL."""
    from nxpipe.pipeline.config.store_section import load_store_section

    return load_store_section(config_path, {name: value for name, value in os.environ.items() if name != VARIABLE})


def _cache(section: "Section", config_path: Path) -> Path:
    return config_path.parent.absolute() / expanded(section.cache)


def open_uncached_store(option: str | None, config_path: Path, console: Console) -> "Store":
    """The store without this machine's cache, for commands that change it."""
    from nxpipe.artifact_store import Store

    return Store(open_configured_store(option, config_path, console).backend)


def require_lasting_store(url: str, environ: Mapping[str, str]) -> None:
    """Raise if a release from GitHub would lose its artifacts: the folders of a job are deleted at its end.

    A folder outside of the workspace of a self-hosted runner stays. Whether its runners share it, only their owner
    knows.
    """
    from nxpipe.artifact_store.url import is_remote
    from nxpipe.pipeline.util.errors import StoreNotKept

    if is_remote(url):
        return
    folder = Path(url.removeprefix("file://")).resolve()
    workspace = Path(environ.get("GITHUB_WORKSPACE", "")).resolve()
    if environ.get("RUNNER_ENVIRONMENT") != "self-hosted" or folder.is_relative_to(workspace):
        raise StoreNotKept(
            f"{url} is a folder of the runner, and GitHub deletes it at the end of the job; set `url` in [store], or "
            f"the GitHub variable {VARIABLE}, to a store in S3"
        )
