"""What lies below a prefix: objects, their versions, and uploads that were broken off."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from nxpipe.artifact_store.backends.protocol import Found
from nxpipe.artifact_store.backends.s3_client import Place
from nxpipe.artifact_store.backends.s3_faults import FAULTS, code_of


def tag_of(found: Mapping[str, Any]) -> str:
    """A version of an object, spelled alike by a listing and by a look-up: listings tell no version ids.

    Equal bytes written again keep their ETag, so the second of the writing belongs to it.
    """
    etag = found["ETag"].strip('"')
    return f"{etag}@{modified(found):.0f}"


def etag_of(tag: str) -> str:
    return f'"{tag.partition("@")[0]}"'


def modified(found: Mapping[str, Any]) -> float:
    """In whole seconds, which is all that a look-up tells."""
    return _seconds(found["LastModified"])


def directly_below(place: Place, prefix: str) -> Sequence[str]:
    with place.faults("list", prefix):
        pages = place.pages("list_objects_v2", Prefix=place.key(prefix), Delimiter="/")
        return [found["Key"].removeprefix(place.prefix) for page in pages for found in page.get("Contents", ())]


def walk(place: Place, prefix: str) -> Iterator[Found]:
    with place.faults("list", prefix):
        for page in place.pages("list_objects_v2", Prefix=place.key(prefix)):
            for found in page.get("Contents", ()):
                path = found["Key"].removeprefix(place.prefix)
                yield Found(path, found["Size"], tag_of(found), modified(found))


def broken_uploads(place: Place, older_than: float) -> Iterator[Found]:
    """An upload is as old as its youngest part: a slow one that is alive is none of these."""
    with place.faults("list the uploads below", ""):
        for page in place.pages("list_multipart_uploads", Prefix=place.prefix):
            for upload in page.get("Uploads", ()):
                if _seconds(upload["Initiated"]) < older_than:
                    found = _with_its_parts(place, upload)
                    if found.modified < older_than:
                        yield found


def end_upload(place: Place, found: Found) -> bool:
    try:
        place.ask("abort_multipart_upload", found.path.rpartition("#")[0], UploadId=found.tag)
    except FAULTS as error:
        if code_of(error) == "NoSuchUpload":
            return False
        raise
    return True


def other_versions(place: Place, path: str, version: str) -> Sequence[str] | None:
    """One of these would show if this version went. None: this one is not the current one any more."""
    key = place.key(path)
    pages = place.pages("list_object_versions", Prefix=key)
    both = [each for page in pages for kind in ("Versions", "DeleteMarkers") for each in page.get(kind, ())]
    ours = [each for each in both if each["Key"] == key]
    if not any(each["VersionId"] == version and each["IsLatest"] for each in ours):
        return None
    return [each["VersionId"] for each in ours if each["VersionId"] != version]


def _with_its_parts(place: Place, upload: Mapping[str, Any]) -> Found:
    """Its key and id make a path that no object has: `#` occurs in none of the store's."""
    parts: list[Mapping[str, Any]] = []
    try:
        for page in place.pages("list_parts", Key=upload["Key"], UploadId=upload["UploadId"]):
            parts += page.get("Parts", ())
    except FAULTS as error:
        if code_of(error) != "NoSuchUpload":  # that one ended while we looked
            raise
    return Found(
        path=f"{upload['Key'].removeprefix(place.prefix)}#{upload['UploadId']}",
        size=sum(part["Size"] for part in parts),
        tag=upload["UploadId"],
        modified=max([_seconds(upload["Initiated"]), *(_seconds(part["LastModified"]) for part in parts)]),
    )


def _seconds(time: datetime) -> float:
    return float(int(time.timestamp()))
