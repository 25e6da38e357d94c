"""What an artifact's programs are predicted to take, held against those of another artifact.

A prediction is what the compiler worked out when it made the program (`emulator.timeline`), from the documented costs
of its instructions. It is no measurement; but two predictions differ by nothing but what is different in the programs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from nxpipe.pipeline.artifacts.difference.programs import FIGURES, identity, number_at
from nxpipe.pipeline.compile import utilisation

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest

_ROUNDING: Final = 1e-9  # of the times that are stored

# `alone`: held against nothing; `new`: the other has no such program; `unknown`: one of the two does not say its time.
Verdict: TypeAlias = Literal["alone", "new", "unknown", "within", "regression"]


@dataclass(frozen=True)
class Timed:
    """A program, and how long it is predicted to take; None where its artifact does not say."""

    name: str
    degree: int
    ns: float | None


@dataclass(frozen=True)
class Line:
    """A program of `artifact` beside the same one of `against`."""

    artifact: str
    target: str
    against: str | None
    program: Timed
    before: Timed | None

    @property
    def change(self) -> float | None:
        """0.05 is 5 % slower."""
        now, then = self.program.ns, self.before.ns if self.before else None
        return now / then - 1 if now is not None and then else None

    def verdict(self, threshold: float) -> Verdict:
        if self.against is None:
            return "alone"
        if self.before is None:
            return "new"
        if self.change is None:
            return "unknown"
        return "regression" if self.change > threshold + _ROUNDING else "within"

    def is_regression(self, threshold: float) -> bool:
        return self.verdict(threshold) == "regression"

    def document(self, threshold: float) -> dict[str, object]:
        return {
            "artifact": self.artifact,
            "target": self.target,
            "program": self.program.name,
            "tensor_parallel": self.program.degree,
            "predicted_ns": self.program.ns,
            "against": self.against,
            "before_ns": self.before.ns if self.before else None,
            "change": self.change,
            "verdict": self.verdict(threshold),
        }


def bench(manifest: "Manifest", before: "Manifest | None", store: "Store") -> list[Line]:
    """Each program beside that of the same phase, batch, bucket and degree."""
    known = timed(before, store) if before else {}
    return [
        Line(manifest.name, manifest.target, before.name if before else None, program, known.get(identity))
        for identity, program in timed(manifest, store).items()
    ]


def timed(manifest: "Manifest", store: "Store") -> "dict[tuple[str, int, int, int], Timed]":
    figures = utilisation.read(manifest, store)
    return {
        identity(one): Timed(one.name, one.tensor_parallel, number_at(figures.get(one.name), FIGURES["predicted_ns"]))
        for one in manifest.executables
    }
