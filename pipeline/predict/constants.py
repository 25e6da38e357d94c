"""The fitted constants of `AWS's compiler` as a file with its provenance, and predictions with an interval."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Count, Digest, Document, Text, parse_document
from nxpipe.artifact_store.errors import NotUnderstood
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.emulator.hardware.links import collectives_ns, host_ns
from nxpipe.pipeline.predict.architectures import architecture, architecture_of
from nxpipe.pipeline.predict.measurements import Configuration, value_of
from nxpipe.pipeline.predict.model import Graph, duration, family_of, graphs
from nxpipe.pipeline.predict.work import Architecture, NotPredicted
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file, write_whole

PREDICTED: Final = "AWS's compiler"  # the name of these predictions in every output
THIS_PROGRAM: Final = "this program"  # the name of the times of the compiler's own programs
COVERAGE: Final = 0.9
_SHIPPED: Final = Path(__file__).with_name("constants.json")
_LARGEST: Final = 1 << 20
FEW: Final = 8  # rows of a family below which its interval is that of all rows

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FittedTable(Document):
    """A table of measurements: its name, the SHA-256 of its bytes, and its rows that were fitted."""

    name: Text
    digest: Digest
    rows: Count


class Constant(Document):
    """A fitted value, and the middle 90 % of those that a bootstrap over models gives."""

    value: Positive
    low: Positive
    high: Positive


class FamilyErrors(Document):
    """Errors of a family's scored rows, each predicted by constants that were fitted without its model.

    `interval` is the factor by which a prediction's bounds lie below and above it; `coverage` the share of rows
    inside the interval that the other models' errors give."""

    rows: Count
    models: Count
    median: Error
    p90: Error
    worst: Error
    within: Share
    interval: Positive
    coverage: Share


class FittedConstants(Document):
    """What `nxpipe calibrate --from` writes: constants, their sources, and the errors that they leave."""

    format: Literal["nxpipe.constants/1"] = "nxpipe.constants/1"
    date: Text
    seed: int
    sources: tuple[FittedTable, ...] = Field(strict=False)
    excluded: dict[Text, Count]
    constants: dict[Text, Constant]
    families: dict[Text, FamilyErrors]

    @property
    def values(self) -> Mapping[str, float]:
        return {name: each.value for name, each in self.constants.items()}

    def interval(self, family: str) -> float:
        """The factor of a family's interval; that of all rows for a family with few."""
        known = self.families.get(family)
        return (known if known and known.rows >= FEW else self.families["all"]).interval

    def write(self, path: Path) -> None:
        """Write the file, in place of an older one."""
        write_whole(path, canonical_json(self.model_dump()) + b"\n")


@cache
def shipped() -> FittedConstants:
    """The constants that this version of nxpipe ships."""
    return read_constants(_SHIPPED)


def read_constants(path: Path) -> FittedConstants:
    """The constants in a file; InputInvalid if it has none."""
    try:
        return parse_document(FittedConstants, json_of(read_file(path, limit=_LARGEST)))
    except (DocumentInvalid, NotUnderstood) as fault:
        raise InputInvalid(
            f"{path}: no fitted constants ({str(fault)[:200]}); write them with `nxpipe calibrate --from`"
        ) from fault


@dataclass(frozen=True)
class Prediction:
    """A predicted value of a metric with its interval, its cycle in seconds, and the term that takes most of it."""

    value: float
    low: float
    high: float
    seconds: float
    floor_seconds: float
    bound: str


def predict(
    configuration: Configuration, fitted: FittedConstants | None = None, architecture: Architecture | None = None
) -> Prediction:
    """The prediction of `AWS's compiler` for a configuration; NotPredicted for one that it does not cover.
    `architecture` is the model's, if it is not that of its name."""
    fitted = fitted or shipped()
    cycle = graphs(configuration, architecture)
    found, floor = duration(cycle, fitted.values), floor_of(cycle)
    factor = fitted.interval(configuration.family)
    bounds = sorted(
        value_of(configuration, max(floor, seconds)) for seconds in (found.seconds / factor, found.seconds * factor)
    )
    return Prediction(value_of(configuration, found.seconds), bounds[0], bounds[1], found.seconds, floor, found.bound)


def floor_of(cycle: Sequence[Graph]) -> float:
    """The least seconds of a cycle: bytes over the HBM rate, or operations over the peak rate, of each graph."""
    return math.fsum(graph.times * graph.floor for graph in cycle)


# The family whose constants predict a program that is executed once for each request, by the kind of architecture.
_FAMILIES: Final = {
    "encoder": "encoder",
    "resnet": "vision-cnn",
    "segmentation-unet": "vision-cnn",
    "vgg": "vision-cnn",
    "vision-transformer": "vision-transformer",
}


@dataclass(frozen=True)
class ProgramTime:
    """The milliseconds that `AWS's compiler` needs for a program, with their interval; or why it predicts none."""

    prediction: Prediction | None
    reason: str = ""

    def document(self) -> dict[str, object]:
        found = self.prediction
        if found is None:
            return {"covered": False, "reason": self.reason}
        times = {"ms": round(found.value, 4), "low_ms": round(found.low, 4), "high_ms": round(found.high, 4)}
        return {"covered": True, **times, "coverage": COVERAGE, "bound_by": found.bound}

    def __str__(self) -> str:
        if self.prediction is None:
            return "not covered"
        low, high = self.prediction.low, self.prediction.high
        return f"{self.prediction.value:.2f} ms ({low:.2f} to {high:.2f})"


@dataclass(frozen=True)
class ExecutionTime:
    """The milliseconds of `this program` from the host's call to its outputs: on the device, by its timeline; what an
    execution with collectives takes beyond it; and the host's call and copies."""

    device: float
    collectives: float
    host: float

    @property
    def ms(self) -> float:
        return self.device + self.collectives + self.host

    def document(self) -> dict[str, float]:
        parts = {"device_ms": self.device, "collectives_ms": self.collectives, "host_ms": self.host}
        return {name: round(value, 6) for name, value in {"ms": self.ms, **parts}.items()}


def execution_times(manifest: Manifest, figures: Mapping[str, Any]) -> dict[str, ExecutionTime]:
    """The times of an artifact's programs by name, from the stored figures of their utilisation. Those of another
    form or target, which another producer may have written, have none."""
    try:
        core = family_of(manifest.target).core
    except NotPredicted:
        return {}
    found = {
        program.name: _execution_time(figures.get(program.name), core, program.tensor_parallel)
        for program in manifest.executables
    }
    return {name: time for name, time in found.items() if time is not None}


def _execution_time(figures: object, core: str, ranks: int) -> ExecutionTime | None:
    match figures:
        case {
            "time": {"latency_ns": float() | int() as latency},
            "instructions": {"by_engine": {**engines}},
            "hbm": {"compulsory": {"input": int() as inputs, "output": int() as outputs}},
        }:
            exchanged = collectives_ns(core, ranks) if "collective" in engines else 0.0
            return ExecutionTime(latency / 1e6, exchanged / 1e6, host_ns(inputs + outputs) / 1e6)
        case _:
            return None


def predict_program(
    model_id: str,
    inputs: Mapping[str, Any],
    *,
    instance: str,
    phase: str,
    batch: int,
    sequence: int,
    degree: int,
) -> ProgramTime:
    """The time of one execution of a program. `inputs` are the inputs of its cache key, which have the model's
    configuration and options; `instance` is an instance type or a family of them."""
    try:
        found = _architecture(model_id, inputs.get("config"))
        options = inputs.get("options")
        exact = isinstance(options, Mapping) and options.get("autocast") == "none"
        configuration = Configuration(
            family=_family(phase, batch, found["kind"]),
            model=model_id,
            instance=instance,
            metric={"prefill": "ttft_ms", "decode": "tpot_ms"}.get(phase, "latency_ms"),
            cores=degree,
            tp=degree,
            batch=batch,
            sequence=sequence,
            autocast="none" if exact else "",
            model_dtype="fp32" if exact else "",
        )
        return ProgramTime(predict(configuration, architecture=found))
    except NotPredicted as reason:
        return ProgramTime(None, str(reason))


def predict_artifact(manifest: Manifest, store: Store) -> dict[str, ProgramTime]:
    """The time of each program of an artifact, by name."""
    inputs = store.key_inputs(manifest)
    return {
        program.name: predict_program(
            manifest.model.id,
            inputs,
            instance=manifest.target,
            phase=program.phase,
            batch=program.batch,
            sequence=program.sequence,
            degree=program.tensor_parallel,
        )
        for program in manifest.executables
    }


def _architecture(model_id: str, config: object) -> Architecture:
    described = dict(_entries(config)) if isinstance(config, Mapping) else {}
    try:
        found = architecture_of(described)
    except (KeyError, TypeError, ZeroDivisionError):  # another producer's entries
        found = None
    found = found or architecture(model_id)
    if found is None:
        raise NotPredicted(f"{model_id}: its architecture has no closed form")
    return found


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers, names and parts of a configuration."""
    kinds = (str, int, bool, list, Mapping, type(None))
    return ((key, value) for key, value in config.items() if isinstance(value, kinds))


def _family(phase: str, batch: int, kind: str) -> str:
    if phase == "decode" or (phase == "prefill" and batch == 1):
        return f"llm-{phase}"
    if phase == "forward" and kind in _FAMILIES:
        return _FAMILIES[kind]
    raise NotPredicted(f"{phase} programs of batch {batch} of a model of kind {kind} are not covered")
