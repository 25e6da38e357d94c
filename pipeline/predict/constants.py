"""The fitted constants of `AWS's compiler` as a file with its provenance, and predictions with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Count, Digest, Document, Text, parse_document
from nxpipe.artifact_store.errors import NotUnderstood
from nxpipe.pipeline.predict.measurements import Configuration, value_of
from nxpipe.pipeline.predict.model import Graph, duration, graphs
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file, write_whole

PREDICTED: Final = "AWS's compiler"  # the name of these predictions in every output
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


def predict(configuration: Configuration, fitted: FittedConstants | None = None) -> Prediction:
    """The prediction of `AWS's compiler` for a configuration; NotPredicted for one that it does not cover."""
    fitted = fitted or shipped()
    cycle = graphs(configuration)
    found, floor = duration(cycle, fitted.values), floor_of(cycle)
    factor = fitted.interval(configuration.family)
    bounds = sorted(
        value_of(configuration, max(floor, seconds)) for seconds in (found.seconds / factor, found.seconds * factor)
    )
    return Prediction(value_of(configuration, found.seconds), bounds[0], bounds[1], found.seconds, floor, found.bound)


def floor_of(cycle: Sequence[Graph]) -> float:
    """The least seconds of a cycle: bytes over the HBM rate, or operations over the peak rate, of each graph."""
    return math.fsum(graph.times * graph.floor for graph in cycle)
