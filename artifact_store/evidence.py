"""Evidence documents: the results of verifying an artifact, stored beside its manifest and never in it.

Differences from the reference depend on the processor, its threads and the build of numpy; an artifact does not: equal
inputs make equal manifests, and any number of builders may add evidence. Section 19 of docs/reference/store-format.md.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field, model_validator

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob, Digest, Document, ForeignName, Label, Name, Sealed, Text
from nxpipe.artifact_store.layout import evidence_path
from nxpipe.artifact_store.manifest import MAX_EXECUTABLES, MAX_OUTPUTS, Manifest

MAX_EVIDENCE_BYTES: Final = 32 * 1024**2
UNVERIFIED: Final = "nothing shows that it was verified; build it again without --no-verify"
EMULATED: Final = "emulated"  # the kind: run by the emulator, held against a reference

Finite = Annotated[float, Field(allow_inf_nan=False)]
Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Figures(Document):
    """How far one output is from the yardstick's. `kl` and `top1` are of logits only, where they could be told."""

    output: ForeignName
    max_absolute: Distance
    mean_absolute: Distance
    max_relative: Distance
    cosine: Finite
    kl: Finite | None
    top1: Share | None


class Limits(Document):
    """What the figures were held to when the document was written. What is None was not asked for."""

    min_cosine: Finite
    max_relative_error: Finite
    max_kl: Finite | None
    min_top1: Finite | None


class Compared(Document):
    """One program. `inputs` and `answers` are safetensors: what it was fed, and what it answered. `surroundings` say
    where: processor, threads, libraries; no host, user or path."""

    program: Name
    yardstick: Name
    outputs: tuple[Figures, ...] = Field(strict=False, min_length=1, max_length=MAX_OUTPUTS)
    inputs: Blob
    answers: Blob
    surroundings: Annotated[dict[Name, Text], Field(max_length=64)]

    @model_validator(mode="after")
    def _names_each_output_once(self) -> "Compared":
        _refuse_twins("output", (each.output for each in self.outputs))
        return self


class Evidence(Sealed):
    """Its name is the digest of what it says, so that several of one manifest lie side by side."""

    max_bytes: ClassVar[int] = MAX_EVIDENCE_BYTES

    format: Literal["nxpipe.evidence/1"] = "nxpipe.evidence/1"
    manifest: Digest
    kind: Label
    programs: tuple[Compared, ...] = Field(strict=False, min_length=1, max_length=MAX_EXECUTABLES)
    limits: Limits

    @model_validator(mode="after")
    def _names_each_program_once(self) -> "Evidence":
        _refuse_twins("program", (each.program for each in self.programs))
        return self

    @property
    def digest(self) -> str:
        return sha256_hex(canonical_json(self.model_dump()))

    @property
    def path(self) -> str:
        return evidence_path(self.manifest, self.digest)

    def blobs(self) -> tuple[Blob, ...]:
        return tuple(dict.fromkeys(blob for each in self.programs for blob in (each.inputs, each.answers)))

    def of(self, program: str) -> Compared | None:
        return next((each for each in self.programs if each.program == program), None)


def gap(manifest: Manifest, evidence: Evidence) -> str | None:
    """What of an artifact a document leaves open, in words; None where it speaks of every output of every program."""
    if evidence.kind != EMULATED:
        return f"evidence {evidence.digest} is of kind {evidence.kind}, not {EMULATED}"
    for executable in manifest.executables:
        compared = evidence.of(executable.name)
        if compared is None:
            return f"evidence {evidence.digest} says nothing of program {executable.name}"
        missing = set(executable.outputs) - {each.output for each in compared.outputs}
        if missing:
            return f"evidence {evidence.digest} says nothing of {executable.name} {min(missing)}"
    return None


def is_covered(manifest: Manifest, evidence: Sequence[Evidence]) -> str | None:
    """The least that is asked of an artifact, in words if it lacks that: one document without a gap."""
    gaps = [gap(manifest, each) for each in evidence]
    if None in gaps:
        return None
    return gaps[0] if gaps else UNVERIFIED


def _refuse_twins(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} appears {count} times")
