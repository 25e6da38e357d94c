"""Published figures of loaded servers beside simulations of the same load, with the interval that plans state.

    python benchmarks/serving_rows.py CSV... [--json]

Rows are those that no constant was fitted to (`scored` 0) of servers whose scheduler is simulated, with a load that the
notes describe: one user, a synchronous client or one request in flight; prompts that are encoded one after another; as
many clients as the server has rows (`throughput load`, by Little's law of the published figures); requests at constant
gaps at the rate which that load reached (`asynchronous load`). The load generator of the last two draws 1,500 +- 150
and 250 +- 20 tokens, ends after 120 s and counts the requests that are answered by then. Figures of Llama-3.1-8B under
the same load, which the tables lack, are added. Left out are speculation, prefix caches, ports that their notes call
limited by their implementation, and servers with a scheduler of their own.

Each row is simulated with steps by predictions of `AWS's compiler`. Its need is the least widening of the predictions'
intervals with which the interval of the figure holds the measured one. The widening that plans use is the quantile of
all needs; a row counts as inside if it is by the widening of the other models' rows. The constants of the predictions
are the shipped ones, which have seen other rows of some of the models. The rate of an asynchronous load is published,
so its throughput hardly depends on the prediction; the last lines count without those rows too, and with the interval
of both factors at the same end, which plans take.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from nxpipe.pipeline.plan.schedulers import Replica, Scheduling
from nxpipe.pipeline.plan.simulation import Outcome, simulate
from nxpipe.pipeline.plan.steps import SERVING, PredictedSteps
from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Request, Traffic
from nxpipe.pipeline.predict.architectures import architecture
from nxpipe.pipeline.predict.constants import COVERAGE
from nxpipe.pipeline.predict.measurements import Configuration, Measured, read
from nxpipe.pipeline.predict.work import NotPredicted

_SECONDS: Final = 120
_MOST: Final = 8.0  # the largest widening that is tried
_SHORTEST: Final = 128  # compiled tokens
_WHAT: Final = {"ttft_ms": "ttft", "tpot_ms": "tpot", "throughput_per_s": "throughput"}
_LOADS: Final = {
    "single user": "synchronous",
    "asynchronous load": "asynchronous",
    "synchronous load": "synchronous",
    "throughput load": "throughput",
    "16 sequences in flight": "throughput",
    "encoded one after another": "batch",
    "lone requests": "synchronous",
}
_OTHER: Final = ("speculation", "prefix caching", "implementation-limited", "data set, not printed")
_LLAMA: Final = "meta-llama/Llama-3.1-8B"
# optimum-neuron's benchmark/vllm, as read in 2026-11: instance, tp, dp, rows, load, metric, value.
_FURTHER: Final = (
    ("inf2.48xlarge", 8, 1, 32, "throughput", "throughput_per_s", 426.0),
    ("inf2.48xlarge", 8, 1, 32, "throughput", "throughput_per_s", 440.0),
    ("inf2.48xlarge", 8, 1, 32, "throughput", "tpot_ms_mean", 59.0),
    ("inf2.48xlarge", 8, 1, 32, "throughput", "tpot_ms_mean", 56.0),
    ("inf2.48xlarge", 8, 1, 32, "synchronous", "tpot_ms_mean", 24.5),
    ("inf2.48xlarge", 8, 3, 32, "throughput", "throughput_per_s", 1226.0),
    ("trn1.32xlarge", 8, 4, 32, "throughput", "throughput_per_s", 1607.0),
)

_Run = tuple[str, str, int, int, int]


@dataclass(frozen=True)
class ServingRow:
    """A row and its load; `rate` is that of requests at constant gaps."""

    row: Measured
    load: str
    notes: str
    rate: float = 0.0

    @property
    def what(self) -> str:
        return next(name for start, name in _WHAT.items() if self.row.configuration.metric.startswith(start))

    @property
    def is_generated(self) -> bool:
        return self.load in ("asynchronous", "throughput")

    @cached_property
    def steps(self) -> PredictedSteps:
        c = self.row.configuration
        known = architecture(c.published_name, c.model)
        if known is None:
            raise NotPredicted("its architecture is not known")
        cores = max(c.tp, c.cores // c.dp)
        return PredictedSteps(c.model, c.instance, c.tp, cores, c.framework, known, tier=c.tier, widening=1.0)

    @cached_property
    def replica(self) -> Replica:
        c = self.row.configuration
        if c.sequence is None:
            raise NotPredicted("its compiled length is not known")
        powers = (1 << power for power in range(20))
        lengths = (*(each for each in powers if _SHORTEST <= each < c.sequence), c.sequence)
        if "vllm-neuron" in c.framework:
            segment = next((each for each in (2048, 4096, 8192) if f"padded to {each}" in self.notes), 2048)
            return Replica(c.batch, c.sequence * c.batch, (segment,), Scheduling.VLLM, segment, 128, longest=c.sequence)
        if "vllm" in c.framework.lower():  # NxD Inference: powers of two
            return Replica(c.batch, c.sequence, lengths, Scheduling.NXDI)
        # Transformers NeuronX behind a server: prompts are padded to the one length whose whole cache decodes read.
        return Replica(c.batch, c.sequence, (c.sequence,), Scheduling.NXDI, longest=c.sequence)

    @cached_property
    def requests(self) -> Sequence[Request]:
        c = self.row.configuration
        if "100 to 1024 tokens" in self.notes:
            prompts = outputs = LengthDistribution("uniform", (100, 1024))
        elif c.inputs is None or c.outputs is None:
            raise NotPredicted("its lengths are not known")
        else:
            spreads = (150, 20) if self.is_generated else (0, 0)
            prompts, outputs = (
                LengthDistribution("uniform", (mean - spread, mean + spread))
                for mean, spread in zip((c.inputs, c.outputs), spreads, strict=True)
            )
        count = {"synchronous": 1, "batch": c.batch, "throughput": 8 * c.batch}.get(self.load, 0)
        rate = self.rate / c.dp or 1.0
        return Traffic(prompts, outputs, Arrivals.CONSTANT).requests(count or round(rate * _SECONDS), 1, rate)

    def interval(self, widening: float) -> tuple[float, float, float]:
        """The figure at the nominal times, and the ends of its interval."""
        points = replace(self.steps, widening=widening).around()
        found = [self._figure(self._outcome(each)) for each in points]
        return found[0], min(found), max(found)

    def holds_between(self, widening: float) -> bool:
        """Whether the figure lies between those at both ends that plans take."""
        ends = [replace(self.steps, widening=widening, bound=bound) for bound in ("low", "nominal", "high")]
        found = [self._figure(self._outcome(each)) for each in ends]
        return min(found) <= self.row.value <= max(found)

    def _outcome(self, steps: PredictedSteps) -> Outcome:
        rows = self.row.configuration.batch
        clients = {"synchronous": 1, "batch": rows, "throughput": rows}.get(self.load)
        return simulate(self.requests, self.replica, steps, concurrency=clients)

    def _figure(self, outcome: Outcome) -> float:
        dp, kept = self.row.configuration.dp, range(len(outcome.latency))
        seconds = outcome.seconds
        if self.load == "asynchronous":  # those that are answered before the generator ends
            ends = [each.arrival + took for each, took in zip(self.requests, outcome.latency, strict=True)]
            first = self.requests[0].arrival
            kept = [number for number in kept if ends[number] - first <= _SECONDS] or [0]  # type: ignore[assignment]
            seconds = max(ends[number] for number in kept) - first
        if self.what == "ttft":
            return 1e3 * sum(outcome.ttft[number] for number in kept) / len(kept)
        if self.what == "tpot":
            return 1e3 * sum(outcome.tpot[number] for number in kept) / len(kept)
        return dp * sum(self.requests[number].output for number in kept) / seconds

    @cached_property
    def need(self) -> float:
        """The least widening that holds the measured figure; infinite if none does."""
        low, high = 0.0, _MOST
        if not self.holds(high):
            return math.inf
        while high - low > 0.01:
            middle = (low + high) / 2
            low, high = (low, middle) if self.holds(middle) else (middle, high)
        return high

    def holds(self, widening: float) -> bool:
        _, low, high = self.interval(widening)
        return low <= self.row.value <= high


def rows_of(paths: Sequence[Path]) -> Iterator[ServingRow]:
    found = []
    rates: dict[_Run, float] = {}
    for path in paths:
        notes = {entry["id"]: entry.get("notes") or "" for entry in csv.DictReader(path.read_text().splitlines())}
        for row in read(path):
            c = row.configuration
            load = _load_of(row, notes[row.id])
            if load is None:
                continue
            found.append(ServingRow(row, load, notes[row.id]))
            if c.metric == "throughput_per_s" and load == "throughput":
                rates[_run(c)] = row.value / (c.outputs or 1)
    found += _further()
    for each in found:
        each = replace(each, rate=rates.get(_run(each.row.configuration), 0.0))
        try:
            if each.load == "asynchronous" and not each.rate:
                continue
            each.interval(1.0)
        except NotPredicted:
            continue
        yield each


def _load_of(row: Measured, notes: str) -> str | None:
    c = row.configuration
    name = c.framework.lower()
    is_served = any(each in name for each in ("vllm", "tgi", "optimum"))
    is_loaded = c.metric.startswith(tuple(_WHAT)) and c.family.startswith("llm")
    if row.scored or not is_served or not is_loaded or any(each in notes for each in _OTHER):
        return None
    by_notes = next((load for words, load in _LOADS.items() if words in notes), None)
    return by_notes or ("synchronous" if c.in_flight == 1 and c.metric == "throughput_per_s" else None)


def _further() -> Iterator[ServingRow]:
    for number, (instance, tp, dp, batch, load, metric, value) in enumerate(_FURTHER):
        configuration = Configuration(
            family="llm-decode", model=_LLAMA, instance=instance, metric=metric, cores=tp * dp, tp=tp, dp=dp,
            batch=batch, sequence=4096, inputs=1500, outputs=250, framework="optimum-neuron vLLM", tier="serving",
        )  # fmt: skip
        yield ServingRow(Measured(f"further-{number}", False, configuration, value), load, "")


def _run(c: Configuration) -> _Run:
    return c.model, c.instance, c.tp, c.dp, c.batch


def quantile(needs: Sequence[float]) -> float:
    """The need below which a share of `COVERAGE` of further rows lies, if they resemble these."""
    ordered = sorted(needs)
    return ordered[min(len(ordered) - 1, math.ceil((len(ordered) + 1) * COVERAGE) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = list(rows_of(options.tables))
    rows = []
    for each in found:
        model = each.row.configuration.model
        others = quantile([other.need for other in found if other.row.configuration.model != model])
        widening = min(others, _MOST)
        nominal, low, high = each.interval(widening)
        rows.append(
            {"id": each.row.id, "model": model, "instance": each.row.configuration.instance, "load": each.load}
            | {"tp": each.row.configuration.tp, "dp": each.row.configuration.dp, "batch": each.row.configuration.batch}
            | {"framework": each.row.configuration.framework, "figure": each.what, "measured": each.row.value}
            | {"predicted": nominal, "low": low, "high": high, "widening": widening, "need": each.need}
            | {"inside": low <= each.row.value <= high, "inside_shipped": each.holds(SERVING)}
            | {"inside_ends": each.holds_between(widening)}
        )
    share = share_of(rows)
    if options.json:
        print(
            json.dumps({"rows": rows, "inside": share, "widening": quantile([each.need for each in found])}, indent=1)
        )
        return
    for row in rows:
        print(
            f"{'in ' if row['inside'] else 'OUT'} {row['figure']:<10} {row['load']:<12} "
            f"{str(row['model']).split('/')[-1][:24]:<24} {row['instance']:<13} tp {row['tp']:<2} x{row['dp']} "
            f"batch {row['batch']:<3} measured {row['measured']:9,.1f} predicted {row['predicted']:9,.1f} "
            f"({row['low']:,.1f} to {row['high']:,.1f}) need {row['need']:.2f}"
        )
    for what in _WHAT.values():
        own = [row for row in rows if row["figure"] == what]
        errors = sorted(math.log(float(row["predicted"]) / float(row["measured"])) for row in own)  # type: ignore[arg-type]
        if own:
            sizes, middle = sorted(map(abs, errors)), len(own) // 2
            print(
                f"{what}: {share_of(own):.0%} of {len(own)} inside, median error {math.expm1(sizes[middle]):.1%}, "
                f"median predicted / measured {math.exp(errors[middle]):.2f}"
            )
    full = [row for row in rows if row["load"] == "throughput"]
    own = [row for row in rows if (row["load"], row["figure"]) != ("asynchronous", "throughput")]
    print(f"throughput loads: {share_of(full):.0%} of {len(full)} inside")
    print(f"without the throughput of asynchronous loads: {share_of(own):.0%} of {len(own)} inside")
    print(f"both factors at the same end: {share_of(rows, 'inside_ends'):.0%}")
    print(
        f"widening of all rows {quantile([each.need for each in found]):.2f}; shipped {SERVING}, "
        f"inside {share_of(rows, 'inside_shipped'):.0%}"
    )
    print(f"{share:.0%} of {len(rows)} inside by the widening of the other models' rows")


def share_of(rows: Sequence[Mapping[str, object]], key: str = "inside") -> float:
    return sum(bool(row[key]) for row in rows) / max(1, len(rows))


if __name__ == "__main__":
    main()
