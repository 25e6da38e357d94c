"""What a signature says: that this manifest came out of these inputs, as an in-toto statement with SLSA provenance.

It tells no time: equal artifacts get equal statements, whoever signs them and whenever.
"""

from typing import Final, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from nxpipe.artifact_store.canonical import canonical_json, parse_canonical_json
from nxpipe.artifact_store.digest import sha256_hex
from nxpipe.artifact_store.documents import Digest, Document, JsonObject, Name, parse_document
from nxpipe.artifact_store.manifest import Manifest

STATEMENT: Final = "https://in-toto.io/Statement/v1"
PROVENANCE: Final = "https://slsa.dev/provenance/v1"
BUILD: Final = "nxpipe:build/1"
MAX_STATEMENT_BYTES: Final = 6 * 1024**2  # in base64, and in an envelope, below the limit of a signature

# Of the key inputs, what the builder brings along; all others are what it was asked for.
_INTERNAL: Final = ("compiler", "libraries")


class _Part(Document):
    model_config = ConfigDict(alias_generator=to_camel)


class Sha256(_Part):
    sha256: Digest


class Resource(_Part):
    name: Name
    digest: Sha256


class BuildDefinition(_Part):
    build_type: Literal["nxpipe:build/1"]
    external_parameters: JsonObject
    internal_parameters: JsonObject
    resolved_dependencies: tuple[Resource, ...] = Field(strict=False, max_length=10_000)


class Builder(_Part):
    id: Name


class RunDetails(_Part):
    builder: Builder


class Provenance(_Part):
    build_definition: BuildDefinition
    run_details: RunDetails


class Statement(_Part):
    type_: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[Resource, ...] = Field(strict=False, min_length=1, max_length=1)
    predicate_type: Literal["https://slsa.dev/provenance/v1"]
    predicate: Provenance

    @property
    def manifest_digest(self) -> str:
        return self.subject[0].digest.sha256

    @property
    def builder(self) -> str:
        return self.predicate.run_details.builder.id

    def to_json(self) -> dict[str, object]:
        return self.model_dump(by_alias=True)

    def to_bytes(self) -> bytes:
        return canonical_json(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Statement":
        return parse_document(cls, parse_canonical_json(data, limit=MAX_STATEMENT_BYTES))


def statement_of(manifest: Manifest, key_inputs: dict[str, object], builder: str) -> Statement:
    """What is known of an artifact's making."""
    named = {
        "_type": STATEMENT,
        "subject": [_resource(manifest.model.id, sha256_hex(manifest.to_bytes()))],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {name: key_inputs[name] for name in key_inputs if name not in _INTERNAL},
                "internalParameters": {name: key_inputs[name] for name in key_inputs if name in _INTERNAL},
                "resolvedDependencies": _dependencies(manifest, key_inputs),
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }
    return parse_document(Statement, named)


def _dependencies(manifest: Manifest, key_inputs: dict[str, object]) -> list[object]:
    """Whatever of the inputs has a digest of its own: the request, the compiler's source, files of weights."""
    found = {"key inputs": manifest.request_key}
    match key_inputs.get("compiler"):
        case {"source": str(digest)}:
            found["compiler"] = digest
    match key_inputs.get("weights"):
        case {"files": dict(files)}:
            found |= {f"weights/{name}": digest for name, digest in files.items()}
    return [_resource(name, digest) for name, digest in found.items()]


def _resource(name: str, digest: str) -> dict[str, object]:
    return {"name": name, "digest": {"sha256": digest}}
