"""Store URLs: a folder or s3://bucket/prefix, opened as a store."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.errors import BadUrl
from nxpipe.artifact_store.fetch.cached_store import CachedStore, MirroredBlobs
from nxpipe.artifact_store.fetch.mirrors import Notice, Sources, ignore_notice
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
    notice: Notice = ignore_notice,
) -> Store:
    """The store at a URL. Nothing is created or contacted before the first use.

    `file:///abs`, `file://relative` and a plain path name a folder, relative to the working directory; a path is taken
    as typed, without percent-encoding. `s3://bucket/prefix` names a prefix of a bucket, whose objects are encrypted
    with `kms_key` if it is given.

    Blobs that the store cannot supply are read from its `mirrors`, in order, and reported to `notice`. Blobs read from
    S3 are stored in `cache`; a local folder needs no cache.
    """
    backend = _backend(url, kms_key)
    read_cache = ReadCache(cache, cache_limit) if cache and is_remote(url) else None
    if not mirrors and not read_cache:
        return Store(backend)
    sources = Sources([backend, *(_backend(mirror, None) for mirror in mirrors)], notice)
    return CachedStore(backend, MirroredBlobs(backend, sources, read_cache), sources)


def open_offline(url: str, cache: Path, cache_limit: int = DEFAULT_LIMIT) -> Store:
    """The locally cached part of a store on S3, read-only and without network access."""
    index = OfflineIndex(cache, url)
    return CachedStore(index, MirroredBlobs(index, Sources(()), ReadCache(cache, cache_limit)), Sources([index]))


def is_remote(url: str) -> bool:
    return url.startswith(_S3)


def anchored(url: str, folder: Path) -> str:
    """The URL of the store, with a relative folder resolved from `folder` instead of the working directory."""
    if is_remote(url):
        return url
    return f"{_FILE}{folder.absolute() / _folder(url)}"


def _folder(url: str) -> Path:
    path = url.removeprefix(_FILE)
    if not path or not path.isprintable():
        raise BadUrl(url, "names no folder")
    if path == url and (scheme := _SCHEME.match(url)):
        raise BadUrl(url, f"starts with {scheme[0]!r}, which is not a supported scheme")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise BadUrl(url, "starts with ~, but the home folder is unknown") from error


def _backend(url: str, kms_key: str | None) -> Backend:
    if is_remote(url):
        return _bucket(url, kms_key)
    return LocalFolder(_folder(url).absolute())


def _bucket(url: str, kms_key: str | None) -> Backend:
    bucket, _, prefix = url.removeprefix(_S3).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise BadUrl(url, f"names {bucket!r}, which is not a bucket name (3-63 of a-z, 0-9, '-' and '.')")
    parts = prefix.rstrip("/").split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or not prefix.isprintable():
        raise BadUrl(url, f"has the prefix {prefix!r}, which is not a plain path")
    from nxpipe.artifact_store.backends.s3 import connect  # the AWS SDK is slow to import
    from nxpipe.artifact_store.backends.s3_client import S3Options

    return connect(bucket, "/".join(parts), S3Options(kms_key=kms_key))
