"""Calibrations: the factor between predicted times and those that devices measured, by phase.

Ratios of times are multiplicative, so factors are fitted to their logarithms. A calibration is shown beside predictions
and changes none. See section Calibration of docs/reference/device-programs.md.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Count, Digest, Document, Label, Name, Text, parse_document
from nxpipe.artifact_store.errors import NotUnderstood, Refused
from nxpipe.artifact_store.evidence import DEVICE, coverage_gap, document_gap
from nxpipe.pipeline.artifacts.bench import PredictedTime, predicted_times
from nxpipe.pipeline.util.errors import InputInvalid, WouldOverwrite
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file, write_whole

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest

FORMAT: Final = "nxpipe.calibration/1"
REPORT_FORMAT: Final = "nxpipe.calibration-report/1"
STAND_IN: Final = "stand-in"  # in the surroundings of evidence: a rehearsal, not AWS's compiler or a device
SOFTWARE: Final = ("compiler", "driver", "runtime")

_LARGEST: Final = 1 << 20  # bytes of a file
_NS: Final = 1e6  # in a millisecond
_SHORTEST_MS: Final = 1e-9  # beyond these a figure is no duration of a program
_LONGEST_MS: Final = 1e9
_SHOWN: Final = 12  # digits of a digest in a message

Ratio = Annotated[float, Field(gt=0, le=1e20)]
Spread = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class PhaseFactor(Document):
    """The geometric mean of measured/predicted, and the geometric standard deviation; None for one measurement."""

    factor: Ratio
    spread: Spread | None
    count: Count


class Calibration(Document):
    """The factors of one instance type and clock, for predictions of one cost model: a target and the digest of a
    compiler's source. `evidence` are the documents that they follow from."""

    format: Literal["nxpipe.calibration/1"] = FORMAT
    instance_type: Name
    target: Name
    clock: Label
    cost_model: Digest
    rehearsal: bool
    software: dict[Name, Annotated[tuple[Text, ...], Field(strict=False)]]
    phases: dict[Name, PhaseFactor] = Field(min_length=1)
    evidence: tuple[Digest, ...] = Field(strict=False, min_length=1)

    def calibrated_ns(self, program: PredictedTime) -> float | None:
        """The predicted time multiplied by its phase's factor; None without either."""
        fitted = self.phases.get(program.phase)
        return fitted.factor * program.ns if fitted and program.ns is not None else None

    def require_for(self, manifest: "Manifest", store: "Store") -> None:
        """Raise InputInvalid for an artifact whose predictions are those of another cost model."""
        if manifest.target != self.target:
            raise InputInvalid(
                f"the calibration is of {self.target}, and {manifest.name} is for {manifest.target}; calibrate with "
                f"artifacts for {manifest.target}"
            )
        if (own := _cost_model(manifest, store)) != self.cost_model:
            raise InputInvalid(
                f"the calibration is of predictions by compiler {self.cost_model[:_SHOWN]}, and those of "
                f"{manifest.name} are by {own[:_SHOWN]}; calibrate with artifacts of the same nxpipe"
            )

    def write(self, path: Path) -> None:
        """Write a new file."""
        if path.exists():
            raise WouldOverwrite(f"{path} exists already; move it away, or pass another file to -o")
        write_whole(path, canonical_json(self.model_dump()) + b"\n")


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file; InputInvalid if it has none."""
    try:
        return parse_document(Calibration, json_of(read_file(path, limit=_LARGEST)))
    except (DocumentInvalid, NotUnderstood) as fault:
        raise InputInvalid(
            f"{path}: no calibration {FORMAT} ({str(fault)[:200]}); write one with `nxpipe calibrate -o`"
        ) from fault


@dataclass(frozen=True)
class Measurement:
    """The p50 of one program in one document of evidence, and its prediction, both in milliseconds."""

    artifact: str
    target: str
    cost_model: str
    program: str
    phase: str
    predicted_ms: float
    p50_ms: float
    clock: str
    surroundings: Mapping[str, str]
    evidence: str

    @property
    def log_ratio(self) -> float:
        return math.log(self.p50_ms) - math.log(self.predicted_ms)

    @property
    def instance_type(self) -> str:
        """The EC2 instance type; a rehearsal may have none."""
        return self.surroundings.get("instance type", STAND_IN)

    @property
    def is_rehearsal(self) -> bool:
        return any(STAND_IN in text for text in self.surroundings.values())

    def require_usable(self, *, rehearsal: bool) -> None:
        """Raise Refused if the measurement is no duration, does not name the device, or is not of one."""
        if not _SHORTEST_MS <= self.p50_ms <= _LONGEST_MS:
            raise Refused(
                f"{self.artifact}: p50 of {self.program} in evidence {self.evidence[:_SHOWN]} is {self.p50_ms:g} ms, "
                "which is no duration; select other evidence with --instance-type or --clock"
            )
        if self.is_rehearsal:
            if not rehearsal:
                raise Refused(
                    f"{self.artifact}: evidence {self.evidence[:_SHOWN]} was made with a {STAND_IN}, not by AWS's "
                    "compiler on a device; pass --rehearsal to fit it all the same"
                )
            return
        for name in ("instance type", "driver"):
            if name not in self.surroundings:
                raise Refused(
                    f"{self.artifact}: evidence {self.evidence[:_SHOWN]} does not name the {name} of its machine; run "
                    f"`nxpipe prove {self.artifact}` on an EC2 instance with the Neuron driver"
                )


@dataclass(frozen=True)
class CalibrationReport:
    """A calibration and the measurements that it was fitted to."""

    calibration: Calibration
    measurements: tuple[Measurement, ...]

    def residual(self, measured: Measurement) -> float:
        """The relative difference of a measurement from the calibrated prediction: 0.05 is 5 % slower."""
        return math.expm1(measured.log_ratio - math.log(self.calibration.phases[measured.phase].factor))

    def document(self) -> dict[str, object]:
        programs = [
            {
                "artifact": each.artifact,
                "program": each.program,
                "phase": each.phase,
                "evidence": each.evidence,
                "predicted_ms": each.predicted_ms,
                "p50_ms": each.p50_ms,
                "ratio": math.exp(each.log_ratio),
                "residual": self.residual(each),
            }
            for each in self.measurements
        ]
        return {**self.calibration.model_dump(), "programs": programs}


def calibrate(measurements: Iterable[Measurement], *, rehearsal: bool = False) -> list[CalibrationReport]:
    """A calibration for each instance type and clock.

    InputInvalid for predictions of several cost models; Refused for a measurement that does not name its machine, and,
    without `rehearsal`, for one with a stand-in."""
    groups = defaultdict[tuple[str, str], list[Measurement]](list)
    for each in measurements:
        each.require_usable(rehearsal=rehearsal)
        groups[each.instance_type, each.clock].append(each)
    return [_calibrated(sorted(group, key=_order)) for _, group in sorted(groups.items())]


def _order(measured: Measurement) -> tuple[str, str, str]:
    return measured.artifact, measured.program, measured.evidence


def _calibrated(group: Sequence[Measurement]) -> CalibrationReport:
    first = group[0]
    _require_one_cost_model(group)
    phases = defaultdict[str, list[float]](list)
    for each in group:
        phases[each.phase].append(each.log_ratio)
    calibration = Calibration(
        instance_type=first.instance_type,
        target=first.target,
        clock=first.clock,
        cost_model=first.cost_model,
        rehearsal=any(each.is_rehearsal for each in group),
        software={name: _software(group, name) for name in SOFTWARE},
        phases={phase: fit(logs) for phase, logs in sorted(phases.items())},
        evidence=_distinct(each.evidence for each in group),
    )
    return CalibrationReport(calibration, tuple(group))


def fit(logs: Sequence[float]) -> PhaseFactor:
    """The factor of logarithms of ratios. Exact sums: neither their order nor a common factor changes the spread."""
    count, mean = len(logs), math.fsum(logs) / len(logs)
    deviations = math.fsum((log - mean) ** 2 for log in logs)
    spread = math.exp(math.sqrt(deviations / (count - 1))) if count > 1 else None
    return PhaseFactor(factor=math.exp(mean), spread=spread, count=count)


def _require_one_cost_model(group: Sequence[Measurement]) -> None:
    first = group[0]
    for other in group:
        if other.target != first.target:
            raise InputInvalid(
                f"{first.artifact} is for {first.target} and {other.artifact} for {other.target}, so no factor fits "
                "both; calibrate them one by one"
            )
        if other.cost_model != first.cost_model:
            raise InputInvalid(
                f"{first.artifact} and {other.artifact} have predictions by two compilers, "
                f"{first.cost_model[:_SHOWN]} and {other.cost_model[:_SHOWN]}, so no factor fits both; build them with "
                "one nxpipe, or calibrate them one by one"
            )


def _software(group: Sequence[Measurement], name: str) -> tuple[str, ...]:
    return _distinct(each.surroundings[name] for each in group if name in each.surroundings)


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def measurements_of(manifest: "Manifest", store: "Store") -> list[Measurement]:
    """The measurements in all complete documents of device evidence of an artifact; Refused without any."""
    evidence = store.evidence(manifest.digest)
    complete = [document for document in evidence if document_gap(manifest, document, DEVICE) is None]
    if not any(compared.timing for document in complete for compared in document.programs):
        gap = coverage_gap(manifest, evidence, DEVICE)
        raise Refused(f"{manifest.name}: {gap or 'its device evidence has no times; run `nxpipe prove` again'}")
    programs = {time.name: time for time in predicted_times(manifest, store).values()}
    cost_model = _cost_model(manifest, store)
    return [
        Measurement(
            artifact=manifest.name,
            target=manifest.target,
            cost_model=cost_model,
            program=compared.program,
            phase=programs[compared.program].phase,
            predicted_ms=_predicted_ms(manifest, programs[compared.program]),
            p50_ms=compared.timing.p50_ms,
            clock=compared.timing.clock,
            surroundings=compared.surroundings,
            evidence=document.digest,
        )
        for document in complete
        for compared in document.programs
        if compared.timing and compared.program in programs
    ]


def _predicted_ms(manifest: "Manifest", program: PredictedTime) -> float:
    if program.ns is None or not _SHORTEST_MS * _NS <= program.ns <= _LONGEST_MS * _NS:
        raise Refused(f"{manifest.name}: {program.name} has no predicted time to compare with; build it again")
    return program.ns / _NS


def _cost_model(manifest: "Manifest", store: "Store") -> str:
    """The digest of the source of the compiler that predicted: any of it may change a prediction."""
    match store.key_inputs(manifest):
        case {"compiler": {"source": str(digest)}}:
            return digest
    raise Refused(f"{manifest.name} does not name the compiler of its predictions; build it again")
