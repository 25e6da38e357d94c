"""Pages of object versions. Moto looks for the version at which the previous page ended, and lists nothing if it was
deleted since, as by a program that deletes each page that it has listed.
"""

from functools import cache
from typing import Any

from moto.core.utils import unix_time_millis
from moto.s3.models import S3Backend

from tests.localaws.moto_patches._around import around


@cache
def apply() -> None:
    around(S3Backend, "list_object_versions", _listed)


def _listed(stock: Any, backend: S3Backend, bucket_name: str, *args: Any, **given: Any) -> Any:
    """The page after the last version that still exists and precedes the marker."""
    key, version = given.get("key_marker"), given.get("version_id_marker")
    if key and version:
        keys = backend.get_bucket(bucket_name).keys
        known = [entry for _, entries in keys.iterlists() for entry in entries]
        if not any((entry.name, entry.version_id) == (key, version) for entry in known):
            before = [entry for entry in known if entry.name < key]
            last = max(before, key=lambda entry: (entry.name, -unix_time_millis(entry.last_modified)), default=None)
            given["key_marker"] = last and last.name
            given["version_id_marker"] = last and last.version_id
    return stock(backend, bucket_name, *args, **given)
