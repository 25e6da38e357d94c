"""Reports of the builds that made an artifact, kept beside it and collected with it.

They hold times, so they are no part of a manifest: equal inputs make equal artifacts, and no two builds take as long.
"""

import re

from artifact_store.backends.protocol import Payload
from artifact_store.errors import InvalidDocument
from artifact_store.layout import is_key, report_path
from artifact_store.store import Store

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
