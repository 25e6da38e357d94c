"""What is true of a store at every moment, whatever was killed or cut: docs/reference/store-format.md, read from the
outside.

Everything here is a function of the objects' bytes, so that one page of promises holds for a folder and for a bucket.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.artifact_store.builds import StepResult
from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.channel.generation import Generation, Head
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.evidence import Evidence, coverage_gap
from nxpipe.artifact_store.layout import (
    ACTIONS,
    BLOBS,
    CHANNELS,
    EVIDENCE,
    LISTINGS,
    PARTS,
    PINS,
    REPORTS,
    RETIRED,
    RUNS,
    action_path,
    blob_path,
    evidence_folder,
    generation_path,
    head_path,
    is_key,
    log_folder,
    number_of,
    retired_path,
)
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pin
from nxpipe.artifact_store.records import ActionRecord
from nxpipe.artifact_store.weights import unpacked

Objects = Mapping[str, bytes]

# Possible remains of a crash, which must only mislead no reader.
_MAY_LIE_ABOUT: Final = ("tmp/", "failures/", "leases/", "sig/", "index/")


@dataclass(frozen=True)
class Visible:
    """The state that readers see: the artifact of each request key, and each channel's history, oldest first."""

    answers: Mapping[str, str]
    histories: Mapping[str, tuple[str, ...]]


def breaches(objects: Objects, *, verified: bool = True) -> list[str]:
    """All violations of the format page's invariants by these objects, as sentences.

    Artifacts of `build --no-verify` are published without evidence; no channel accepts one.
    """
    return [
        *_broken_blobs(objects),
        *_strangers(objects),
        *_broken_answers(objects, verified=verified),
        *_broken_channels(objects),
        *_broken_names(objects),
        *_broken_evidence(objects),
    ]


def visible(objects: Objects) -> Visible:
    keys = [path.removeprefix(ACTIONS) for path in objects if path.startswith(ACTIONS)]
    records = [ActionRecord.from_bytes(objects[action_path(key)]) for key in keys if is_key(key)]
    histories = {channel: tuple(entry.digest for entry in history(objects, channel)) for channel in channels(objects)}
    return Visible({record.request_key: record.manifest.sha256 for record in records}, histories)


def channels(objects: Objects) -> list[str]:
    return sorted({path.split("/")[1] for path in objects if path.startswith(CHANNELS) and "/log/" in path})


def history(objects: Objects, channel: str) -> list[Generation]:
    """Every generation of a channel, the first one first."""
    folder = log_folder(channel)
    names = (path.removeprefix(folder) for path in objects if path.startswith(folder))
    numbers = sorted(filter(None, map(number_of, names)))
    return [Generation.from_bytes(objects[generation_path(channel, number)]) for number in numbers]


def _broken_blobs(objects: Objects) -> Iterator[str]:
    for path, data in objects.items():
        if path.startswith(BLOBS) and path != blob_path(Blob.of(data)):
            yield f"{path} has the content of {sha256_hex(data)}"


def _strangers(objects: Objects) -> Iterator[str]:
    known = (BLOBS, ACTIONS, PARTS, CHANNELS, PINS, REPORTS, EVIDENCE, RETIRED, RUNS, LISTINGS, *_MAY_LIE_ABOUT)
    for path, data in objects.items():
        if not path.startswith(known):
            yield f"{path} is at no place of the format page"
        if path.startswith(LISTINGS):
            json.loads(data)


def _broken_answers(objects: Objects, *, verified: bool) -> Iterator[str]:
    """A visible artifact is complete and verified, unless the build required completeness only."""
    for path, data in objects.items():
        if path.startswith((ACTIONS, RETIRED)):
            record = ActionRecord.from_bytes(data)
            if path not in (action_path(record.request_key), retired_path(record.request_key)):
                yield f"{path} is the record of {record.request_key}"
            yield from _incomplete(objects, record.manifest, path, verified=verified)


def _broken_channels(objects: Objects) -> Iterator[str]:
    """A history is complete: from 1 on without a gap, each entry named by its successor."""
    for channel in channels(objects):
        previous = None
        entries = history(objects, channel)
        for number, entry in enumerate(entries, 1):
            if (entry.generation, entry.channel, entry.previous) != (number, channel, previous):
                yield f"generation {number} of {channel} is out of the chain: {entry}"
            previous = entry.digest
        # Older states may be collected, served ones may not.
        for served in entries[-1].artifacts:
            yield from _incomplete(objects, served.manifest, f"the tip of {channel}", verified=True)
        if (data := objects.get(head_path(channel))) is not None:
            head = Head.from_bytes(data)
            if head.channel != channel or head.generation > len(entries):
                yield f"the head of {channel} is ahead of its log: {head}"


def _broken_names(objects: Objects) -> Iterator[str]:
    for path, data in objects.items():
        if path.startswith(PINS):
            pin = Pin.from_bytes(data)
            if pin.path != path:
                yield f"{path} is the pin {pin.name}"
        if path.startswith(PARTS):
            part = StepResult.from_bytes(data)
            if part.path != path:
                yield f"{path} is the part {part.key}"
            yield from (f"{path} names {blob.sha256}, which is gone" for blob in part.blobs() if _lacks(objects, blob))


def _broken_evidence(objects: Objects) -> Iterator[str]:
    """Each document is at the place that it names, and does not outlive a blob that it names."""
    for path, data in objects.items():
        if path.startswith(EVIDENCE):
            found = Evidence.from_bytes(data)
            if found.path != path:
                yield f"{path} is the evidence {found.path}"
            yield from (f"{path} names {blob.sha256}, which is gone" for blob in found.blobs() if _lacks(objects, blob))


def _incomplete(objects: Objects, blob: Blob, where: str, *, verified: bool) -> Iterator[str]:
    if _lacks(objects, blob):
        yield f"{where} names manifest {blob.sha256}, which is missing or damaged"
        return
    manifest = Manifest.from_bytes(objects[blob_path(blob)])
    for entry in manifest.blobs():
        if _lacks(objects, entry):
            yield f"{where} needs blob {entry.sha256}, which is missing or damaged"
    for tensor in manifest.weights:
        if tensor.pack is not None and not _holds(objects, tensor.pack, tensor.blob):
            yield f"{where} needs {tensor.name}, which its pack does not hold"
    if verified:
        yield from _unverified(objects, blob, manifest, where)


def _unverified(objects: Objects, blob: Blob, manifest: Manifest, where: str) -> Iterator[str]:
    folder = evidence_folder(blob.sha256)
    evidence = [Evidence.from_bytes(data) for path, data in objects.items() if path.startswith(folder)]
    # An artifact without programs needs no evidence; these tests publish all others as a build does.
    if manifest.executables and (gap := coverage_gap(manifest, evidence)) is not None:
        yield f"{where} names manifest {blob.sha256}: {gap}"


def _lacks(objects: Objects, blob: Blob) -> bool:
    data = objects.get(blob_path(blob))
    return data is None or Blob.of(data) != blob


def _holds(objects: Objects, pack: Blob, tensor: Blob) -> bool:
    try:
        piece = unpacked(objects.get(blob_path(pack), b"")).get(tensor.sha256)
    except InvalidDocument:
        return False
    return piece is not None and len(piece) == tensor.size
