"""Results of public load generators: `vllm bench serve`, AIPerf and guidellm, as files of JSON or CSV.

Latencies are milliseconds at quantiles, and `None` for the mean. Any other file is refused in one sentence.
"""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file

_LARGEST: Final = 256 << 20  # bytes: some of them keep every request
_PARTS: Final = 50_000_000
Latencies = Mapping[float | None, float]


@dataclass(frozen=True)
class LoadTest:
    """One load: what the server generated, and how fast it answered."""

    tool: str
    file: str
    tokens: float  # generated in a second
    requests: float | None = None  # answered in a second
    prompt: float | None = None  # tokens, on average
    output: float | None = None
    concurrency: float | None = None
    model: str = ""
    date: str = ""
    ttfts: Latencies = field(default_factory=dict)
    tpots: Latencies = field(default_factory=dict)

    def ttft(self, quantile: float | None) -> float | None:
        return _at(self.ttfts, quantile)

    def tpot(self, quantile: float | None) -> float | None:
        return _at(self.tpots, quantile)


def _at(latencies: Latencies, quantile: float | None) -> float | None:
    """The latency at a quantile; between two that were measured that of the higher one, which errs on the safe side."""
    if quantile in latencies:
        return latencies[quantile]
    above = [known for known in latencies if known is not None and quantile is not None and known >= quantile]
    return latencies[min(above)] if above else None


class _Malformed(Exception):
    """What a file lacks, as the end of a sentence."""


def read_load_tests(path: Path) -> list[LoadTest]:
    """The loads of a file, at least one; InputInvalid for a file that is none of these."""
    try:
        data = read_file(path, limit=_LARGEST)
        text = data.decode("utf-8-sig")
        found = list(_of_json(text, path.name) if text.lstrip()[:1] in ("{", "[") else _of_csv(text, path.name))
    except (OSError, UnicodeDecodeError, DocumentInvalid, _Malformed, csv.Error) as fault:
        reason = str(fault).rstrip(".") or type(fault).__name__
        raise InputInvalid(
            f"--measured {path}: not a result of vllm bench serve, AIPerf or guidellm ({reason[:160]}); pass the file "
            "that the tool saved"
        ) from fault
    if not found:
        raise InputInvalid(f"--measured {path}: it has no finished load; pass a result with answered requests")
    return found


def _of_json(text: str, file: str) -> Iterator[LoadTest]:
    """A document, or one for each line, as `vllm bench serve --append-result` writes them."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(line.startswith("{") and line.rstrip().endswith("}") for line in lines):
        documents = [json_of(line, parts=_PARTS) for line in lines]
    else:
        document = json_of(text, parts=_PARTS)
        documents = document if isinstance(document, list) else [document]
    for document in documents:
        if not isinstance(document, dict):
            raise _Malformed("a document is no object")
        if "benchmarks" in document:
            yield from _of_guidellm(document, file)
        elif "output_throughput" in document:
            yield _of_vllm(document, file)
        elif "output_token_throughput" in document:
            yield _of_aiperf(document, file)
        else:
            raise _Malformed("no output_throughput, output_token_throughput or benchmarks")


def _number(value: object, name: str, *, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < least:
        raise _Malformed(f"{name} is {str(value)[:40]!r}, no number of at least {least:g}")
    return float(value)


def _optional(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    return None if value is None else _number(value, name)


def _positive(value: object, name: str) -> float:
    found = _number(value, name)
    if found == 0.0:
        raise _Malformed(f"{name} is 0: no token was generated")
    return found


_VLLM_LATENCY: Final = re.compile(r"(mean|median|p[0-9.]+)_(ttft|tpot)_ms")


def _of_vllm(document: Mapping[str, Any], file: str) -> LoadTest:
    latencies: dict[str, dict[float | None, float]] = {"ttft": {}, "tpot": {}}
    for name, value in document.items():
        if match := _VLLM_LATENCY.fullmatch(name):
            latencies[match[2]][_quantile(match[1])] = _number(value, name)
    completed = _positive(document.get("completed"), "completed")
    inputs, outputs = _optional(document, "total_input_tokens"), _optional(document, "total_output_tokens")
    return LoadTest(
        "vllm bench serve",
        file,
        _positive(document["output_throughput"], "output_throughput"),
        _optional(document, "request_throughput"),
        inputs / completed if inputs is not None else None,
        outputs / completed if outputs is not None else None,
        _optional(document, "max_concurrency"),
        str(document.get("model_id", "")),
        str(document.get("date", "")),
        latencies["ttft"],
        latencies["tpot"],
    )


def _quantile(name: str) -> float | None:
    """mean, avg, median, p95, p99.9."""
    if name in ("mean", "avg"):
        return None
    try:
        return 0.5 if name == "median" else float(name.removeprefix("p")) / 100
    except ValueError:
        raise _Malformed(f"{name} is no percentile") from None


_STATISTIC: Final = re.compile(r"avg|p[0-9.]+")


def _of_aiperf(document: Mapping[str, Any], file: str) -> LoadTest:
    def average(name: str) -> float | None:
        found = document.get(name)
        return _optional(found, "avg") if isinstance(found, Mapping) else None

    def latencies(name: str) -> Latencies:
        found = document.get(name) or {}
        if not isinstance(found, Mapping):
            raise _Malformed(f"{name} is no object")
        scale = _scale(str(found.get("unit", "ms")), name)
        return {
            _quantile(key): scale * _number(value, f"{name}.{key}")
            for key, value in found.items()
            if _STATISTIC.fullmatch(key) and value is not None
        }

    config = document.get("input_config")
    loadgen = config.get("loadgen", {}) if isinstance(config, Mapping) else {}
    return LoadTest(
        "AIPerf",
        file,
        _positive(average("output_token_throughput"), "output_token_throughput.avg"),
        average("request_throughput"),
        average("input_sequence_length"),
        average("output_sequence_length"),
        _optional(loadgen, "concurrency") if isinstance(loadgen, Mapping) else None,
        date=str(document.get("start_time", ""))[:10],
        ttfts=latencies("time_to_first_token"),
        tpots=latencies("inter_token_latency"),
    )


def _scale(unit: str, name: str) -> float:
    """Milliseconds of a unit."""
    try:
        return {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "ns": 1e-6}[unit]
    except KeyError:
        raise _Malformed(f"{name} is in {unit[:20]!r}, not in ms") from None


def _of_guidellm(document: Mapping[str, Any], file: str) -> Iterator[LoadTest]:
    benchmarks = document["benchmarks"]
    if not isinstance(benchmarks, list):
        raise _Malformed("benchmarks is no list")
    for benchmark in benchmarks:
        metrics = benchmark.get("metrics") if isinstance(benchmark, Mapping) else None
        if not isinstance(metrics, Mapping):
            raise _Malformed("a benchmark has no metrics")
        tokens = _successful(metrics, "output_tokens_per_second")
        if tokens.get(None):
            yield LoadTest(
                "guidellm",
                file,
                tokens[None],
                _successful(metrics, "requests_per_second").get(None),
                _successful(metrics, "prompt_token_count").get(None),
                _successful(metrics, "output_token_count").get(None),
                _successful(metrics, "request_concurrency").get(None),
                ttfts=_successful(metrics, "time_to_first_token_ms"),
                tpots=_successful(metrics, "inter_token_latency_ms"),
            )


def _successful(metrics: Mapping[str, Any], name: str) -> Latencies:
    """The distribution of a metric over successful requests."""
    of_status = metrics.get(name)
    found = of_status.get("successful") if isinstance(of_status, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    values: dict[float | None, float] = {}
    for key, quantile in (("mean", None), ("median", 0.5)):
        if found.get(key) is not None:
            values[quantile] = _number(found[key], f"{name}.{key}")
    percentiles = found.get("percentiles")
    for key, value in percentiles.items() if isinstance(percentiles, Mapping) else ():
        # p001 is the 0.1th percentile, p01 the first, p50 the median
        digits = key.removeprefix("p")
        if digits.isdecimal() and value is not None:
            values[int(digits) / 10 ** len(digits)] = _number(value, f"{name}.{key}")
    return values


def _of_csv(text: str, file: str) -> Iterator[LoadTest]:
    rows = list(csv.reader(text.splitlines()))
    if (rows and rows[0][:2] == ["Metric", "avg"]) or any(row[:2] == ["Metric", "Value"] for row in rows):
        yield _of_aiperf_csv(rows, file)
    elif len(rows) > 3 and "Token Throughput" in rows[0]:
        yield from _of_guidellm_csv(rows, file)
    else:
        raise _Malformed("neither JSON nor a CSV with the columns of AIPerf or guidellm")


_METRIC: Final = re.compile(r"(.+) \(([^()]+)\)")


def _of_aiperf_csv(rows: Sequence[Sequence[str]], file: str) -> LoadTest:
    """Two sections: distributions with a column for each statistic, and single values."""
    document: dict[str, dict[str, object]] = {}
    header: Sequence[str] = ()
    for row in rows:
        if not row or row[0] == "Metric":
            header = row[1:] if row else ()
        elif header and (match := _METRIC.fullmatch(row[0])):
            name = match[1].strip().lower().replace(" ", "_")
            values = {
                "avg" if key == "Value" else key: _cell(value, row[0])
                for key, value in zip(header, row[1:], strict=False)
                if value
            }
            document[name] = {"unit": match[2], **values}
    return _of_aiperf(document, file)


def _cell(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _Malformed(f"{name} has {text[:20]!r}, no number") from None


_PERCENTILES: Final = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.75, 0.9, 0.95, 0.99, 1.0)


def _of_guidellm_csv(rows: Sequence[Sequence[str]], file: str) -> Iterator[LoadTest]:
    """Three rows of header: group, metric with its status, statistic. Percentiles are a list in one cell."""
    keys = list(zip(*rows[:3], strict=False))
    for row in rows[3:]:
        cells = dict(zip(keys, row, strict=False))

        def of(group: str, metric: str, cells: Mapping[tuple[str, ...], str] = cells) -> Latencies:
            found: dict[float | None, float] = {}
            for statistic, quantile in (("Mean", None), ("Median", 0.5)):
                if text := cells.get((group, f"Successful {metric}", statistic)):
                    found[quantile] = _cell(text, f"{group} {metric}")
            listed = cells.get((group, f"Successful {metric}", "Percentiles"), "").strip("[] ")
            values = [_cell(each, f"{group} {metric}") for each in listed.split(",")] if listed else []
            if len(values) == len(_PERCENTILES):
                found |= dict(zip(_PERCENTILES, values, strict=True))
            return found

        tokens = of("Token Throughput", "Output Tokens/Sec").get(None)
        if tokens:
            yield LoadTest(
                "guidellm",
                file,
                tokens,
                of("Server Throughput", "Requests/Sec").get(None),
                of("Token Metrics", "Input Tokens").get(None),
                of("Token Metrics", "Output Tokens").get(None),
                of("Server Throughput", "Concurrency").get(None),
                ttfts=of("Time to First Token", "ms"),
                tpots=of("Inter Token Latency", "ms"),
            )
