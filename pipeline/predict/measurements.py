"""Published measurements as rows of a CSV: their configurations, and the cycle that each value implies."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nxpipe.pipeline.util.errors import InputInvalid

COLUMNS: Final = (
    *("id", "tier", "scored", "family", "model", "published_name", "instance", "nodes", "cores_used", "tp_degree"),
    *("dp", "pp", "batch", "in_flight", "seq_len", "input_len", "output_len", "image_size", "model_dtype", "autocast"),
    *("metric", "value", "framework", "neuron_version"),
)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a published row measured: a model on cores of an instance, and the metric."""

    family: str
    model: str
    published_name: str = ""
    instance: str
    metric: str
    cores: int = 1
    tp: int = 1
    dp: int = 1
    pp: int = 1
    nodes: int = 1
    batch: int = 1
    global_batch: int | None = None
    in_flight: float | None = None
    sequence: int | None = None
    inputs: int | None = None
    outputs: int | None = None
    image: tuple[int, int] | None = None
    framework: str = ""
    sdk: str = ""
    tier: str = ""
    model_dtype: str = ""
    autocast: str = ""

    @property
    def code(self) -> str:
        """The generator of the programs: torch-neuronx traces, Transformers NeuronX, NxD Inference, training."""
        if self.family in ("training", "diffusion"):
            return self.family
        if self.family == "llm-prefill":
            return f"{self._library}-prefill"
        return self._library if self.family == "llm-decode" else "traced"

    @property
    def _library(self) -> str:
        name = self.framework.lower()
        if "nxd" in name or "vllm" in name:
            return "nxd"
        if self.tier == "serving":
            return "served"
        return "tnx" if name else "nxd"

    @property
    def transformers_neuronx(self) -> bool:
        """Whether that library generated the programs; optimum-neuron and TGI used it until SDK 2.20."""
        name = self.framework.lower()
        return self._library == "tnx" or (self._library == "served" and ("vllm" not in name))

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers of the SDK's version; the last of a range of them."""
        return tuple(int(each) for each in (self.sdk.split() or [""])[-1].split(".") if each.isdecimal())

    @property
    def queued(self) -> float:
        """Requests in flight for each replica: how many of its cycles a request takes."""
        return max(1.0, (self.in_flight or self.dp) / self.dp)


@dataclass(frozen=True)
class Measured:
    """One row: what was measured, whether it counts, and the value in the unit of its metric."""

    id: str
    scored: bool
    configuration: Configuration
    value: float

    @property
    def cycle(self) -> float | None:
        """Seconds of one execution of what the row measures; None for a metric that implies none."""
        return cycle_of(self.configuration, self.value)


def cycle_of(c: Configuration, value: float) -> float | None:
    """Seconds between two requests, tokens or sequences of one replica."""
    if c.metric.startswith("latency_ms"):
        return value / 1e3 / c.queued
    if c.metric.startswith(("tpot_ms", "ttft_ms")):
        return value / 1e3
    if c.metric == "throughput_per_s" and not c.family.startswith("llm"):
        return c.dp * c.batch / value
    return 1 / value if c.metric == "train_seq_per_s" else None


def value_of(c: Configuration, cycle: float) -> float:
    """The value of the row's metric at a cycle: the inverse of `cycle_of`."""
    if c.metric.startswith("latency_ms"):
        return cycle * 1e3 * c.queued
    if c.metric.startswith(("tpot_ms", "ttft_ms")):
        return cycle * 1e3
    return (1 if c.metric == "train_seq_per_s" else c.dp * c.batch) / cycle


def read(path: Path) -> tuple[Measured, ...]:
    """All rows of a file; InputInvalid names the file, the line and the column that is not understood."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as fault:
        raise InputInvalid(f"{path}: not a readable CSV file ({fault}); pass a table of measurements") from fault
    reader = csv.DictReader(text.splitlines())
    if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
        raise InputInvalid(f"{path}: no column {missing[0]}; docs/reference/prediction.md lists the columns of a table")
    return tuple(_rows(path, reader))


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[Measured]:
    for row in reader:
        cells = _Cells(f"{path}: line {reader.line_num}", row)
        value = cells.number("value")
        if value is None or not 0 < value < float("inf"):
            raise cells.invalid("value", "a positive number")
        yield Measured(row["id"], row["scored"] == "1", _configuration(cells), value)


@dataclass(frozen=True)
class _Cells:
    """The cells of a row, read as numbers; an empty cell is None."""

    place: str
    row: Mapping[str, str | None]

    def text(self, column: str) -> str:
        return self.row.get(column) or ""

    def number(self, column: str) -> float | None:
        try:
            return float(self.text(column)) if self.text(column) else None
        except ValueError:
            raise self.invalid(column, "a number") from None

    def count(self, column: str) -> int | None:
        number = self.number(column)
        if number is None:
            return None
        if not 1 <= number < 1e9 or number != int(number):
            raise self.invalid(column, "a whole number from 1")
        return int(number)

    def size(self, column: str) -> tuple[int, int] | None:
        """Width and height; a video has its frames in front."""
        if not self.text(column):
            return None
        *_, width, height = (["x", "x", *self.text(column).split("x")])[-2:]
        if not (width.isdecimal() and height.isdecimal()):
            raise self.invalid(column, "width x height, such as 224x224")
        return int(width), int(height)

    def invalid(self, column: str, wanted: str) -> InputInvalid:
        return InputInvalid(f"{self.place}: {column} is {self.row[column]!r:.60}, not {wanted}; correct the row")


def _configuration(cells: _Cells) -> Configuration:
    return Configuration(
        family=cells.text("family"),
        model=cells.text("model"),
        published_name=cells.text("published_name"),
        instance=cells.text("instance"),
        metric=cells.text("metric"),
        cores=cells.count("cores_used") or 1,
        tp=cells.count("tp_degree") or 1,
        dp=cells.count("dp") or 1,
        pp=cells.count("pp") or 1,
        nodes=cells.count("nodes") or 1,
        batch=cells.count("batch") or 1,
        global_batch=cells.count("global_batch"),
        in_flight=cells.number("in_flight"),
        sequence=cells.count("seq_len"),
        inputs=cells.count("input_len"),
        outputs=cells.count("output_len"),
        image=cells.size("image_size"),
        framework=cells.text("framework"),
        sdk=cells.text("neuron_version"),
        tier=cells.text("tier"),
        model_dtype=cells.text("model_dtype"),
        autocast=cells.text("autocast"),
    )
