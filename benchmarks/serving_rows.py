"""Published figures of loaded servers beside simulations of the same load, with the interval that plans state.

    python benchmarks/serving_rows.py CSV... [--json]

Rows are those of servers that no constant was fitted to: `scored` 0, a server's framework, and a load that the notes
describe: one user or a synchronous client, as many clients as the server has rows (`throughput load`, by Little's law
of the published figures), or requests at constant gaps at the rate of that load (`asynchronous load`), both for 120 s,
the default of the load generator. Each is simulated with steps by predictions of `AWS's compiler`; the interval is that
of `pipeline/plan/steps.py`. The last lines say for each figure which factor holds 90 % of the rows, with a correction
for few rows, and the share of rows that the factor of the other models' rows holds.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.hardware.instance import INSTANCES
from nxpipe.pipeline.plan.schedulers import Replica, Scheduling
from nxpipe.pipeline.plan.simulation import Outcome, simulate
from nxpipe.pipeline.plan.steps import Bound, PredictedSteps
from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Traffic
from nxpipe.pipeline.predict.constants import COVERAGE
from nxpipe.pipeline.predict.measurements import Measured, read
from nxpipe.pipeline.predict.model import architecture
from nxpipe.pipeline.predict.work import NotPredicted

_SECONDS: Final = 120
_SERVERS: Final = ("vllm", "tgi", "optimum")
_WHAT: Final = {"ttft_ms": "ttft", "tpot_ms": "tpot", "throughput_per_s": "throughput"}


@dataclass(frozen=True)
class ServingRow:
    """A row, its load, and the figure that the simulation predicts at the ends of its interval."""

    row: Measured
    load: str
    what: str
    low: float
    nominal: float
    high: float

    @property
    def error(self) -> float:
        return math.log(self.nominal / self.row.value)

    @property
    def is_inside(self) -> bool:
        return self.low <= self.row.value <= self.high


def load_of(notes: str) -> str | None:
    for word in ("single user", "asynchronous", "synchronous", "throughput load", "encoded one after another"):
        if word in notes:
            return {"single user": "synchronous", "encoded one after another": "batch"}.get(word, word.split()[0])
    return None


def rows_of(paths: Sequence[Path]) -> Iterator[ServingRow]:
    rates: dict[tuple[Any, ...], float] = {}
    found = []
    for path in paths:
        notes = {entry["id"]: entry["notes"] for entry in csv.DictReader(path.read_text().splitlines())}
        for row in read(path):
            load = load_of(notes[row.id])
            if row.scored or load is None or not any(name in row.configuration.framework.lower() for name in _SERVERS):
                continue
            found.append((row, load))
            if row.configuration.metric == "throughput_per_s" and load == "throughput":
                rates[_run(row)] = row.value / (row.configuration.outputs or 1)
    for row, load in found:
        try:
            figures = {bound: _figure(_simulated(row, load, bound, rates), row) for bound in ("low", "nominal", "high")}
        except NotPredicted:
            continue
        # Requests that join a batch earlier make it slower, so the ends need not be in order.
        low, high = min(figures.values()), max(figures.values())
        yield ServingRow(row, load, _what(row), low, figures["nominal"], high)


def _run(row: Measured) -> tuple[Any, ...]:
    c = row.configuration
    return c.model, c.instance, c.tp, c.dp, c.batch


def _what(row: Measured) -> str:
    return next(name for start, name in _WHAT.items() if row.configuration.metric.startswith(start))


def _simulated(row: Measured, load: str, bound: Bound, rates: dict[tuple[Any, ...], float]) -> Outcome:
    c = row.configuration
    known = architecture(c.published_name, c.model)
    if known is None or c.sequence is None or c.inputs is None or c.outputs is None:
        raise NotPredicted("its lengths or its model are not known")
    type_ = INSTANCES[c.instance]
    cores = c.tp * (type_.cores // type_.logical_cores)
    steps = PredictedSteps(c.model, c.instance, c.tp, cores, c.framework, known, bound, tier="serving")
    # optimum-neuron compiles one length, to which prompts are padded and whose whole cache each decode reads.
    replica = Replica(c.batch, c.sequence, (c.sequence,), Scheduling.NXDI, longest=c.sequence)
    prompts, outputs = LengthDistribution("fixed", (c.inputs,)), LengthDistribution("fixed", (c.outputs,))
    traffic = Traffic(prompts, outputs, Arrivals.CONSTANT)
    if load == "synchronous":
        return simulate(traffic.requests(20, 1, 1.0), replica, steps, concurrency=1)
    if load == "batch":
        return simulate(traffic.requests(c.batch, 1, 1.0), replica, steps, concurrency=c.batch)
    rate = rates.get(_run(row))
    if rate is None:
        raise NotPredicted("the rate of the load is not known")
    requests = traffic.requests(max(c.batch, round(rate / c.dp * _SECONDS)), 1, rate / c.dp)
    return simulate(requests, replica, steps, concurrency=c.batch if load == "throughput" else None)


def _figure(outcome: Outcome, row: Measured) -> float:
    match _what(row):
        case "ttft":
            return 1e3 * sum(outcome.ttft) / len(outcome.ttft)
        case "tpot":
            return 1e3 * sum(outcome.tpot) / len(outcome.tpot)
        case _:
            return outcome.tokens_per_second * row.configuration.dp


def quantile(errors: Sequence[float]) -> float:
    """The error below which a share of `COVERAGE` of further rows lies, if they resemble these."""
    ordered = sorted(map(abs, errors))
    return ordered[min(len(ordered) - 1, math.ceil((len(ordered) + 1) * COVERAGE) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path, metavar="CSV")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = list(rows_of(options.tables))
    inside = sum(each.is_inside for each in found)
    if options.json:
        rows = [
            {"id": each.row.id, "load": each.load, "what": each.what, "measured": each.row.value}
            | {"low": each.low, "nominal": each.nominal, "high": each.high, "inside": each.is_inside}
            for each in found
        ]
        print(json.dumps({"rows": len(found), "inside": inside / max(1, len(found)), "found": rows}, indent=1))
        return
    for each in found:
        c = each.row.configuration
        print(
            f"{'in ' if each.is_inside else 'OUT'} {each.what:<10} {each.load:<12} {c.model.split('/')[-1][:24]:<24} "
            f"{c.instance:<14} tp {c.tp:<2} x{c.dp} batch {c.batch:<3} measured {each.row.value:9,.1f} predicted "
            f"{each.nominal:9,.1f} ({each.low:,.1f} to {each.high:,.1f})"
        )
    by_model: dict[str, list[float]] = {}
    for each in found:
        by_model.setdefault(f"{each.row.configuration.model} {each.what}", []).append(each.error)
    for what in ("ttft", "tpot", "throughput"):
        own = [each for each in found if each.what == what]
        if own:
            left_out = [
                abs(each.error)
                <= quantile([other.error for other in own
                             if other.row.configuration.model != each.row.configuration.model] or [0.0])
                for each in own
            ]  # fmt: skip
            print(
                f"{what}: {len(own)} rows, median error {sorted(abs(each.error) for each in own)[len(own) // 2]:.1%}, "
                f"factor of 90 %: {math.exp(quantile([each.error for each in own])):.2f}; inside by the other models' "
                f"factor: {sum(left_out) / len(own):.0%}"
            )
    print(f"{inside} of {len(found)} inside the stated interval: {inside / max(1, len(found)):.0%}")


if __name__ == "__main__":
    main()
