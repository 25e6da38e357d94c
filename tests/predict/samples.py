"""Tables of measurements that a known set of constants implies."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from nxpipe.pipeline.predict.measurements import COLUMNS, read, value_of
from nxpipe.pipeline.predict.model import duration, graphs

ROW: Mapping[str, str] = dict.fromkeys(COLUMNS, "") | {
    "tier": "current",
    "scored": "1",
    "family": "encoder",
    "model": "bert-base-uncased",
    "instance": "inf2.xlarge",
    "cores_used": "2",
    "tp_degree": "1",
    "dp": "2",
    "batch": "1",
    "in_flight": "2",
    "seq_len": "128",
    "metric": "latency_ms_p50",
    "value": "1.0",
    "framework": "PyTorch 2.9",
}
DECODE: Mapping[str, str] = dict(ROW) | {
    "family": "llm-decode",
    "model": "meta-llama/Llama-2-13b-hf",
    "instance": "inf2.48xlarge",
    "cores_used": "24",
    "tp_degree": "24",
    "dp": "1",
    "in_flight": "1",
    "seq_len": "4096",
    "input_len": "128",
    "output_len": "1024",
    "metric": "tpot_ms_p50",
    "framework": "Transformers NeuronX",
}


def write_table(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    """A CSV of these rows, each with an id of its own."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**row, "id": f"row{index}"} for index, row in enumerate(rows))
    return path


def measured_by(path: Path, constants: Mapping[str, float]) -> Path:
    """The same table with the values that these constants predict."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row, measured in zip(rows, read(path), strict=True):
        c = measured.configuration
        row["value"] = repr(value_of(c, duration(graphs(c), constants).seconds))
    return write_table(path, rows)
