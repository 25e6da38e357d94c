"""Reports of the builds that made an artifact, kept beside it and collected with it.

They hold times, so they are no part of a manifest: equal inputs make equal artifacts, and no two builds take as long.
"""

import re

from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.layout import is_key, report_folder, report_path
from nxpipe.artifact_store.store import Store

KINDS = ("html", "json")
_MOMENT = re.compile(r"\d{8}T\d{6}(\.\d{1,6})?Z")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


def moment_of(began_at: str) -> str:
    """A time as a name of files: some systems allow no colon in one."""
    if not _TIME.fullmatch(began_at):
        raise InvalidDocument(f"{began_at!r} is not a time in UTC, as 2026-01-31T12:00:00.000000Z is one")
    return began_at.replace("-", "").replace(":", "")


def store_report(store: Store, manifest_digest: str, began_at: str, *, html: bytes, json: bytes) -> None:
    """Keep the report of one build beside an artifact; said again, it replaces what was said."""
    if not is_key(manifest_digest):
        raise InvalidDocument(f"{manifest_digest!r} is not the digest of a manifest")
    for kind, data in (("html", html), ("json", json)):
        store.backend.replace(report_path(manifest_digest, moment_of(began_at), kind), Payload.of(data))


def moments_of(store: Store, manifest_digest: str) -> list[str]:
    """When the builds began whose reports are kept, the newest last."""
    names = (path.rpartition("/")[2] for path in store.backend.paths(report_folder(manifest_digest)))
    found = {moment for moment, dot, kind in (name.rpartition(".") for name in names) if dot and kind in KINDS}
    return sorted(filter(_MOMENT.fullmatch, found))


def read_report(store: Store, manifest_digest: str, moment: str, kind: str) -> bytes | None:
    chunks = store.backend.read(report_path(manifest_digest, moment, kind))
    return None if chunks is None else b"".join(chunks)
