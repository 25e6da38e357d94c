"""Predicted times of an artifact's programs, compared with those of a baseline, and times that devices measured.

A prediction is the latency of the compiler's timeline, from documented instruction costs. It is not a measurement, but
two predictions differ only by differences of the programs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from nxpipe.artifact_store.channel.log import channels
from nxpipe.artifact_store.trust.channel_trust import ALL
from nxpipe.pipeline.artifacts.channels import fleet_of_channel
from nxpipe.pipeline.artifacts.difference import FIGURES, identity, measured_times, number_at, weights_drift
from nxpipe.pipeline.compile import artifact_files

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.generation import Served
    from nxpipe.artifact_store.evidence import Timing
    from nxpipe.artifact_store.manifest import Manifest

_NS_OF_MS: Final = 1e6
_ROUNDING: Final = 1e-9  # relative rounding of stored times

# `alone`: no baseline; `new`: the baseline has no such program; `unknown`: one of the two has no predicted time.
Verdict: TypeAlias = Literal["alone", "new", "unknown", "within", "regression"]


@dataclass(frozen=True)
class PredictedTime:
    """A program and its predicted time; None if its artifact has none. `measured` is that of its device evidence."""

    name: str
    phase: str
    degree: int
    ns: float | None
    measured: "Timing | None" = None

    @property
    def ratio(self) -> float | None:
        """The measured p50 as a multiple of the prediction."""
        return self.measured.p50_ms * _NS_OF_MS / self.ns if self.measured and self.ns else None


@dataclass(frozen=True)
class BenchLine:
    """A program of `artifact` and the same one of `against`, its baseline."""

    artifact: str
    target: str
    against: str | None
    program: PredictedTime
    before: PredictedTime | None

    @property
    def change(self) -> float | None:
        """Relative change: 0.05 is 5 % slower."""
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

    def document(self, threshold: float, *, measured: bool = False) -> dict[str, object]:
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
            **(self._measured() if measured else {}),
        }

    def _measured(self) -> dict[str, object]:
        now, before = (program.measured if program else None for program in (self.program, self.before))
        return {
            "measured": now.model_dump() if now else None,
            "measured_ratio": self.program.ratio,
            "measured_before": before.model_dump() if before else None,
        }


def bench(
    manifest: "Manifest", before: "Manifest | None", store: "Store", *, measured: bool = False
) -> list[BenchLine]:
    """Each program with the baseline's program of the same phase, batch, bucket and tensor-parallel degree. `measured`:
    with the times of device evidence."""
    baseline = predicted_times(before, store, measured=measured) if before else {}
    return [
        BenchLine(manifest.name, manifest.target, before.name if before else None, program, baseline.get(identity))
        for identity, program in predicted_times(manifest, store, measured=measured).items()
    ]


def predicted_times(
    manifest: "Manifest", store: "Store", *, measured: bool = False
) -> "dict[tuple[str, int, int, int], PredictedTime]":
    figures = artifact_files.read(manifest, store)
    timings = measured_times(manifest, store.evidence(manifest.digest)) if measured else {}
    return {
        identity(program): PredictedTime(
            program.name,
            program.phase,
            program.tensor_parallel,
            number_at(figures.get(program.name), FIGURES["predicted_ns"]),
            timings.get(program.name),
        )
        for program in manifest.executables
    }


def served_comparisons(manifest: "Manifest", store: "Store", *, drift: bool = True) -> list[dict[str, object]]:
    """The artifact against those that channels serve for the same model and target: predicted times of the programs
    that both have, and the drift of the weights. Channels that rollouts change are left out."""
    found = []
    for channel in channels(store.backend):
        tip = None if fleet_of_channel(channel) else ALL.tip(store, channel)
        for served in tip.artifacts if tip else ():
            if served.slot == (manifest.model.id, manifest.target):
                found.append({"channel": channel, "artifact": served.name} | _compared(manifest, served, store, drift))
    return found


def _compared(manifest: "Manifest", served: "Served", store: "Store", drift: bool) -> dict[str, object]:
    if served.manifest.sha256 == manifest.digest:
        return {"same": True}
    before = store.manifest(served.manifest)
    programs = [
        {"program": line.program.name, "before_ns": line.before.ns, "after_ns": line.program.ns}
        for line in bench(manifest, before, store)
        if line.before
    ]
    return {"same": False, "programs": programs, "drift": weights_drift(before, manifest, store) if drift else None}
