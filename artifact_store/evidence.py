"""Evidence documents: the results of verifying an artifact, stored beside its manifest and never in it.

Differences from the reference depend on the processor, its threads and the build of numpy. A manifest does not: equal
inputs make equal manifests, and any number of builders may add evidence. Section 19 of docs/reference/store-format.md.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob, Count, Digest, Document, ForeignName, Label, Name, Sealed, Text
from nxpipe.artifact_store.layout import evidence_path
from nxpipe.artifact_store.manifest import MAX_EXECUTABLES, MAX_OUTPUTS, Manifest

MAX_EVIDENCE_BYTES: Final = 32 * 1024**2

# Kinds of evidence, by what ran: the graph in the engines' arithmetic, the program on the emulated core, the HLO module
# by XLA on the CPU, the NEFF on Neuron devices.
EMULATED: Final = "emulated"
INSTRUCTIONS: Final = "instructions"
XLA: Final = "xla"
DEVICE: Final = "device"
KINDS: Final = (EMULATED, INSTRUCTIONS, XLA, DEVICE)

UNVERIFIED: Final = "it has no evidence of a verification; build it again without --no-verify"
_REMEDIES: Final[Mapping[str, str]] = {
    EMULATED: "build it again without --no-verify",
    INSTRUCTIONS: "run: nxpipe verify {} --mode isa --attest",
    XLA: "build it with --backend neuronx, without --no-verify",
    DEVICE: "on an instance with Neuron devices, run: nxpipe prove {}",
}

Finite = Annotated[float, Field(allow_inf_nan=False)]
Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Figures(Document):
    """Differences of one output from the reference. `kl` and `top1` are only for logits, if they can be computed."""

    output: ForeignName
    max_absolute: Distance
    mean_absolute: Distance
    max_relative: Distance
    cosine: Finite
    kl: Finite | None
    top1: Share | None


class Limits(Document):
    """The thresholds of the figures when the document was written; None: no threshold."""

    min_cosine: Finite
    max_relative_error: Finite
    max_kl: Finite | None
    min_top1: Finite | None


class Timing(Document):
    """Durations of one program, in milliseconds. `clock` is what measured them: `device`, `host`."""

    clock: Label
    runs: Count
    p50_ms: Distance
    p99_ms: Distance


class Compared(Document):
    """The comparison of one program. `inputs` and `answers` are its inputs and outputs as safetensors. `surroundings`
    are processor, threads and libraries, or instance type, driver and runtime of a device; no host, user or path.
    Evidence of kind `device` has a timing; other documents do not have the field."""

    program: Name
    yardstick: Name
    outputs: tuple[Figures, ...] = Field(strict=False, min_length=1, max_length=MAX_OUTPUTS)
    inputs: Blob
    answers: Blob
    surroundings: Annotated[dict[Name, Text], Field(max_length=64)]
    timing: Timing | None = None

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return fields if self.timing else {name: value for name, value in fields.items() if name != "timing"}

    @model_validator(mode="after")
    def _names_each_output_once(self) -> "Compared":
        _refuse_duplicates("output", (figures.output for figures in self.outputs))
        return self


class Evidence(Sealed):
    """One verification of an artifact. Its name is its digest, so that a manifest may have several documents."""

    max_bytes: ClassVar[int] = MAX_EVIDENCE_BYTES

    format: Literal["nxpipe.evidence/1"] = "nxpipe.evidence/1"
    manifest: Digest
    kind: Label
    programs: tuple[Compared, ...] = Field(strict=False, min_length=1, max_length=MAX_EXECUTABLES)
    limits: Limits

    @model_validator(mode="after")
    def _names_each_program_once(self) -> "Evidence":
        _refuse_duplicates("program", (compared.program for compared in self.programs))
        return self

    @property
    def digest(self) -> str:
        return sha256_hex(canonical_json(self.model_dump()))

    @property
    def path(self) -> str:
        return evidence_path(self.manifest, self.digest)

    def blobs(self) -> tuple[Blob, ...]:
        blobs = (blob for compared in self.programs for blob in (compared.inputs, compared.answers))
        return tuple(dict.fromkeys(blobs))

    def of(self, program: str) -> Compared | None:
        return next((compared for compared in self.programs if compared.program == program), None)


def document_gap(manifest: Manifest, evidence: Evidence, kind: str = EMULATED) -> str | None:
    """A message about the first program or output that a document does not cover; None if it covers the artifact."""
    if evidence.kind != kind:
        return f"evidence {evidence.digest} is of kind {evidence.kind}, not {kind}"
    for executable in manifest.executables:
        compared = evidence.of(executable.name)
        if compared is None:
            return f"evidence {evidence.digest} does not cover program {executable.name}"
        missing = set(executable.outputs) - {figures.output for figures in compared.outputs}
        if missing:
            return f"evidence {evidence.digest} does not cover {executable.name} {min(missing)}"
    return None


def coverage_gap(manifest: Manifest, evidence: Sequence[Evidence], kind: str = EMULATED) -> str | None:
    """None if one document of the kind covers the whole artifact; else the gap of the first of them, as a message."""
    gaps = [document_gap(manifest, document, kind) for document in evidence if document.kind == kind]
    if None in gaps:
        return None
    if gaps:
        return gaps[0]
    return _absence(manifest, kind) if evidence or kind != EMULATED else UNVERIFIED


def _absence(manifest: Manifest, kind: str) -> str:
    return f"it has no evidence of kind {kind}; {_REMEDIES[kind].format(manifest.name)}"


def missing_kinds(
    manifest: Manifest, evidence: Sequence[Evidence], kinds: Collection[str] = (EMULATED,)
) -> dict[str, str]:
    """The kinds that no document covers, each with its gap as a message."""
    gaps = ((kind, coverage_gap(manifest, evidence, kind)) for kind in kinds)
    return {kind: gap for kind, gap in gaps if gap is not None}


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} appears {count} times")
