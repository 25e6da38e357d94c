"""From a URL to a store."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from artifact_store.errors import BadUrl
from artifact_store.store import Store

if TYPE_CHECKING:
    from artifact_store.backends.s3_client import S3Options

_FILE: Final = "file://"
_S3: Final = "s3://"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_store(url: str, s3: "S3Options | None" = None) -> Store:
    """The store at a URL. Nothing is created or contacted before the first use.

    `file:///abs`, `file://relative` and a plain path name a folder, relative ones from the working directory; what
    follows `file://` is a path as typed, without percent-encoding. `s3://bucket/prefix` names a place in a bucket,
    which is asked as `s3` says.
    """
    if url.startswith(_S3):
        return _open_s3(url, s3)
    from artifact_store.backends.local import LocalFolder

    return Store(LocalFolder(_folder(url).absolute()))


def anchored(url: str, folder: Path) -> str:
    """The same store, with a relative folder taken from `folder` instead of the working directory."""
    if url.startswith(_S3):
        return url
    return f"{_FILE}{folder.absolute() / _folder(url)}"


def _folder(url: str) -> Path:
    path = url.removeprefix(_FILE)
    if not path or not path.isprintable():
        raise BadUrl(url, "names no folder")
    if path == url and _SCHEME.match(url):
        raise BadUrl(url, f"has the unknown scheme {url.partition(':')[0]!r}")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise BadUrl(url, "starts with ~, and no home folder is known") from error


def _open_s3(url: str, options: "S3Options | None") -> Store:
    bucket, _, prefix = url.removeprefix(_S3).partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise BadUrl(url, f"names {bucket!r}, which is no bucket name (3-63 of a-z, 0-9, '-' and '.')")
    parts = prefix.rstrip("/").split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts) or not prefix.isprintable():
        raise BadUrl(url, f"has the prefix {prefix!r}, which is no plain path")
    from artifact_store.backends.s3 import connect  # the AWS SDK takes a while to import
    from artifact_store.backends.s3_client import S3Options

    return Store(connect(bucket, "/".join(parts), options or S3Options()))
