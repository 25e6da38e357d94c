"""All readers of bytes from others, each with an example input."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.builds import Failure, Lease, ResultFile, StepResult
from nxpipe.artifact_store.canonical import canonical_json, parse_canonical_json, sha256_hex
from nxpipe.artifact_store.channel.change import Requirements, promote
from nxpipe.artifact_store.channel.generation import Head
from nxpipe.artifact_store.documents import Blob, Sealed
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.artifact_store.pins import Pins
from nxpipe.artifact_store.trust.envelope import Envelope, Statement, statement_of
from nxpipe.artifact_store.weights import packed, unpacked
from tests.artifact_store.samples import publish_verified
from tests.faults import bundles
from tests.faults.operations import AUTHOR, artifact

LIMIT = 1024**2  # size in bytes
ZEROS = "0" * 64


@dataclass(frozen=True)
class Parser:
    read: Callable[[bytes], object]
    example: bytes


def parsers() -> Mapping[str, Parser]:
    """The parsers by name. Only `InvalidDocument` is permitted from any of them."""
    with TemporaryDirectory() as folder:
        store = Store(LocalFolder(Path(folder)))
        manifest = artifact(store, "seed", "request")
        one = publish_verified(store, manifest)
        generation = promote(store, "prod", [one], AUTHOR, Requirements()).generation
        carried = bundles.readers(store, one)
        pin = Pins(store.backend).add("keep", one.record.manifest, actor="ann", reason="because")
    at = pin.at
    parts = {Blob.of(data): data for data in (b"one", b"two" * 50, b"")}
    lease = Lease(request_key=ZEROS, term=1, holder="ann", acquired_at=at, expires_at=at)
    failure = Failure(request_key=ZEROS, kind="Error", message="no", log=None, at=at, expires_at=at)
    files = (ResultFile(path="graph", blob=one.record.manifest), ResultFile(path="program", blob=one.record.manifest))
    part = StepResult(key=ZEROS, files=files, facts={"bytes": 1, "cores": [0.5]}, write_id="0" * 32)
    statement = statement_of(manifest, {"request": 1}, "https://example.com/builder").to_bytes()
    envelope = {"payload": "e30=", "payloadType": "application/vnd.in-toto+json", "signatures": []}
    sealed: list[Sealed] = [one.record, generation, Head(channel="prod", generation=1), pin, lease, failure, part]
    return {
        "canonical JSON": Parser(lambda data: parse_canonical_json(data, limit=LIMIT), manifest.to_bytes()),
        "manifest": Parser(Manifest.from_bytes, manifest.to_bytes()),
        "pack": Parser(unpacked, packed(parts)),
        "statement": Parser(Statement.from_bytes, statement),
        "envelope": Parser(Envelope.from_bytes, canonical_json(envelope)),
        **{name: Parser(read, example) for name, (read, example) in carried.items()},
        **{type(entry).__name__: Parser(resealed(type(entry)), entry.to_bytes()) for entry in sealed},
    }


def resealed(kind: type[Sealed]) -> Callable[[bytes], object]:
    """A parser behind the correct seal, which fuzzers cannot guess."""

    def read(data: bytes) -> object:
        fields = parse_canonical_json(data, limit=kind.max_bytes)
        if isinstance(fields, dict):
            fields.pop("seal", None)
            data = canonical_json(fields | {"seal": sha256_hex(canonical_json(fields))})
        return kind.from_bytes(data)

    return read
