"""Store URLs: a folder or s3://bucket/prefix, opened as a store."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.errors import BadUrl
from nxpipe.artifact_store.fetch.cached_store import CachedStore, MirroredBlobs
from nxpipe.artifact_store.fetch.mirrors import Notice, Sources, unnoticed
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.fetch.read_cache import DEFAULT_LIMIT, ReadCache
from nxpipe.artifact_store.store import Store

_FILE: Final = "file://"
_S3: Final = "s3://"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/*")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_store(
    url: str,
    *,
    mirrors: Sequence[str] = (),
    cache: Path | None = None,
    cache_limit: int = DEFAULT_LIMIT,
    kms_key: str | None = None,
    notice: Notice = unnoticed,
) -> Store:
    """The store at a URL. Nothing is created or contacted before the first use.

    `file:///abs`, `file://relative` and a plain path name a folder, relative ones from the working directory; what
    follows `file://` is a path as typed, without percent-encoding. `s3://bucket/prefix` names a place in a bucket,
    whose objects are encrypted with `kms_key` if one is given.

    What the store cannot give is read from its `mirrors`, in order, and `notice` is told. What was read from S3 is kept
    in `cache`; a folder is near enough.
    """
    backend = _backend(url, kms_key)
    tier = ReadCache(cache, cache_limit) if cache and is_remote(url) else None
    if not mirrors and not tier:
        return Store(backend)
    sources = Sources([backend, *(_backend(mirror, None) for mirror in mirrors)], notice)
    return CachedStore(backend, MirroredBlobs(backend, sources, tier), sources)


def open_offline(url: str, cache: Path, cache_limit: int = DEFAULT_LIMIT) -> Store:
    """What this machine has seen of a store on S3: no network is used, and nothing can be written."""
    seen = OfflineIndex(cache, url)
    return CachedStore(seen, MirroredBlobs(seen, Sources(()), ReadCache(cache, cache_limit)), Sources([seen]))


def is_remote(url: str) -> bool:
    return url.startswith(_S3)


def anchored(url: str, folder: Path) -> str:
    """The same store, with a relative folder taken from `folder` instead of the working directory."""
    if is_remote(url):
        return url
    return f"{_FILE}{folder.absolute() / _folder(url)}"


def _folder(url: str) -> Path:
    path = url.removeprefix(_FILE)
    if not path or not path.isprintable():
        raise BadUrl(url, "names no folder")
    if path == url and (scheme := _SCHEME.match(url)):
        raise BadUrl(url, f"starts with {scheme[0]!r}, which is no kind of store")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise BadUrl(url, "starts with ~, and no home folder is known") from error


def _backend(url: str, kms_key: str | None) -> Backend:
    if is_remote(url):
        return _bucket(url, kms_key)
    return LocalFolder(_folder(url).absolute())


def _bucket(url: str, kms_key: str | None) -> Backend:
    bucket, _, prefix = url.removeprefix(_S3).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise BadUrl(url, f"names {bucket!r}, which is no bucket name (3-63 of a-z, 0-9, '-' and '.')")
    parts = prefix.rstrip("/").split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or not prefix.isprintable():
        raise BadUrl(url, f"has the prefix {prefix!r}, which is no plain path")
    from nxpipe.artifact_store.backends.s3 import connect  # the AWS SDK takes a while to import
    from nxpipe.artifact_store.backends.s3_client import S3Options

    return connect(bucket, "/".join(parts), S3Options(kms_key=kms_key))
