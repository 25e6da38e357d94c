"""Predictions against published measurements: `python benchmarks/published.py CSV [--json] [--leave-one-out model]`.

For each family: errors of `AWS's compiler` beside those of a plain roofline and of an analytic planner, the pairs of
rows that are ordered right, and predictions below the floor. With --leave-one-out, each row of the CSV is predicted by
constants that are fitted to the CSV (and to --with) without the rows of its model or instance.

`this program` is the time of our compiler's program on documented costs, divided by the measurement. Programs are kept
in the folder of --cache: compiling all rows takes many minutes. --programs none leaves this part out.

--results FILE writes docs/results/published.md: both predictions, without the row's model, without its instance type,
and by the shipped constants.
"""

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any

from published_programs import executions

from nxpipe.pipeline.predict.constants import PREDICTED, THIS_PROGRAM, floor_of, predict, read_constants, shipped
from nxpipe.pipeline.predict.fit import conformal, quantile, select
from nxpipe.pipeline.predict.measurements import Measured, cycle_of, read
from nxpipe.pipeline.predict.model import graphs
from nxpipe.pipeline.predict.work import NotPredicted
from nxpipe.pipeline.util.errors import InputInvalid

ROOFLINE, ANALYTIC = "roofline", "analytic planner"
_WORST = 12  # rows that are listed
GROUPS = {"all": (), "all but prefill": ("llm-prefill",)}
_PROGRAMS = {"encoders, decode and vision": ("encoder", "llm-decode", "vision-cnn", "vision-transformer")}


@dataclass(frozen=True)
class Compared:
    """A measured cycle and the predicted ones, in seconds; inside says whether the value is in the interval."""

    row: Measured
    measured: float
    floor: float
    predicted: dict[str, float]
    inside: bool


def compare(rows: Sequence[Measured], constants: Path | None) -> tuple[list[Compared], dict[str, str]]:
    """Scored rows with their predictions, and the reasons why others have none."""
    fitted, found, missing = read_constants(constants) if constants else shipped(), [], {}
    for row in rows:
        if not row.scored or row.cycle is None:
            continue
        try:
            cycle, predicted = graphs(row.configuration), predict(row.configuration, fitted)
        except NotPredicted as reason:
            missing[row.id] = str(reason)
            continue
        found.append(_compared(row, cycle, predicted.seconds, predicted.low <= row.value <= predicted.high))
    return found, missing


def _compared(row: Measured, cycle: Any, seconds: float, inside: bool) -> Compared:
    assert row.cycle is not None
    baselines = {ROOFLINE: floor_of(cycle), ANALYTIC: math.fsum(graph.times * graph.analytic for graph in cycle)}
    return Compared(row, row.cycle, floor_of(cycle), {PREDICTED: seconds} | baselines, inside)


def leave_out(rows: Sequence[Measured], others: Sequence[Measured], by: str) -> tuple[list[Compared], dict[str, str]]:
    """The same with constants fitted without the rows of each model or instance."""
    selection = select([*rows, *others])
    problem = selection.problem()
    groups = [getattr(row.configuration, by) for row, _ in selection.rows]
    logs = problem.left_out(groups, problem.fit())
    ids = {row.id for row in rows}
    kept = [
        (row, cycle, float(log))
        for (row, cycle), log in zip(selection.rows, logs, strict=True)
        if row.scored and row.id in ids
    ]
    found = []
    for row, cycle, log in kept:
        c = row.configuration
        width = conformal(
            [
                e
                for r, _, e in kept
                if r.configuration.family == c.family and getattr(r.configuration, by) != getattr(c, by)
            ]
            or [e for r, _, e in kept if getattr(r.configuration, by) != getattr(c, by)]
        )
        found.append(_compared(row, cycle, cycle_of(c, row.value) * math.exp(log), abs(log) <= width))  # type: ignore[operator]
    missing = {}
    for row in rows:
        if row.scored and row.cycle is not None and row.id not in {r.id for r, _, _ in kept}:
            missing[row.id] = f"{row.configuration.model}: not covered"
    return found, missing


def figures(rows: Sequence[Compared], predictor: str) -> dict[str, Any]:
    """Errors of one predictor over some rows."""
    logs = [math.log(row.predicted[predictor] / row.measured) for row in rows]
    # The error of the published value: a rate's is that of the inverse.
    errors = sorted(
        abs(math.expm1(-log if "per_s" in row.row.configuration.metric else log))
        for row, log in zip(rows, logs, strict=True)
    )
    return {
        "median": quantile(errors, 0.5),
        "p90": quantile(errors, 0.9),
        "worst": errors[-1],
        "within 1.5x": sum(abs(log) <= math.log(1.5) for log in logs) / len(logs),
        "ranking": ranking(rows, predictor),
        "below the floor": sum(row.predicted[predictor] < row.floor * (1 - 1e-9) for row in rows),
    }


def ranking(rows: Sequence[Compared], predictor: str) -> float | None:
    """The share of pairs of a model's rows with one metric that are ordered as measured; None without pairs."""
    models = defaultdict(list)
    for row in rows:
        c = row.row.configuration
        models[c.family, c.model, c.metric.partition("_")[0]].append(row)
    right = [
        (a.predicted[predictor] - b.predicted[predictor]) * (a.measured - b.measured) > 0
        for same in models.values()
        for a, b in combinations(same, 2)
        if abs(math.log(a.measured / b.measured)) > 0.02  # closer ones are noise
    ]
    return sum(right) / len(right) if right else None


def programs(rows: Sequence[Measured], *, jobs: int, cache: Path | None) -> dict[str, Any]:
    """Ratios of our programs to the measurements, by family and row, and the reasons of rows without a program."""
    scored = [row for row in rows if row.scored and row.cycle is not None]
    found = executions([row.configuration for row in scored], jobs=jobs, folder=cache)
    ratios: dict[str, list[float]] = defaultdict(list)
    lines, missing = [], {}
    for row in scored:
        times = found[row.configuration]
        if isinstance(times, str):
            missing[row.id] = times
            continue
        c, ratio = row.configuration, times["cycle"] / row.cycle  # type: ignore[operator]
        groups = [name for name, families in _PROGRAMS.items() if c.family in families]
        for group in (c.family, *groups):
            ratios[group].append(ratio)
        named = {"id": row.id, "family": c.family, "model": c.model, "instance": c.instance, "tp": c.tp}
        shape = {"batch": c.batch, "sequence": c.sequence, "inputs": c.inputs}
        floor = floor_of(graphs(c))
        lines.append(named | shape | {"measured": row.cycle, "ratio": ratio, "below": times["cycle"] < floor} | times)
    return {
        "families": {name: _ratios(sorted(ratios[name])) for name in sorted(ratios)},
        "below the floor": [line["id"] for line in lines if line["below"]],
        "rows": sorted(lines, key=lambda line: -line["ratio"]),
        "not compiled": missing,
    }


def _ratios(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(ratios),
        "median": quantile(ratios, 0.5),
        "p90": quantile(ratios, 0.9),
        "least": ratios[0],
        "worst": ratios[-1],
    }


def report(rows: Sequence[Compared], missing: dict[str, str], ours: dict[str, Any] | None) -> dict[str, Any]:
    """All figures by family and predictor."""
    families = sorted({row.row.configuration.family for row in rows})
    parts = {family: [row for row in rows if row.row.configuration.family == family] for family in families}
    parts |= {
        name: [row for row in rows if row.row.configuration.family not in without] for name, without in GROUPS.items()
    }
    return {
        "families": {
            name: {"n": len(part), "inside the interval": sum(row.inside for row in part) / len(part)}
            | {predictor: figures(part, predictor) for predictor in (PREDICTED, ROOFLINE, ANALYTIC)}
            for name, part in parts.items()
            if part
        },
        "not predicted": missing,
        "this program": ours,
    }


def page(document: dict[str, Any]) -> str:
    """The report as a table for people."""
    titles = ("median", "p90", "worst", "in 1.5x", "ranked", "floor", "in interval")
    lines = [f"{'family':20} {'n':>4} {'predictor':18}" + "".join(f" {title:>11}" for title in titles)]
    for family, part in document["families"].items():
        for predictor in (PREDICTED, ROOFLINE, ANALYTIC):
            f = part[predictor]
            ranked = "-" if f["ranking"] is None else f"{f['ranking']:.0%}"
            inside = f"{part['inside the interval']:.0%}" if predictor == PREDICTED else ""
            shares = [f"{f[name]:.1%}" for name in ("median", "p90", "worst", "within 1.5x")]
            cells = (*shares, ranked, str(f["below the floor"]), inside)
            lines.append(f"{family:20} {part['n']:4} {predictor:18}" + "".join(f" {cell:>11}" for cell in cells))
    lines += [f"not predicted: {id_}: {reason}" for id_, reason in document["not predicted"].items()]
    if ours := document["this program"]:
        lines += ["", *_programs_page(ours)]
    return "\n".join(lines)


def _programs_page(ours: dict[str, Any]) -> list[str]:
    """The ratios of our programs, and their worst rows."""
    titles = ("median", "p90", "least", "worst")
    lines = [f"{'this program / measured':28} {'n':>4}" + "".join(f" {title:>8}" for title in titles)]
    for family, ratios in ours["families"].items():
        lines.append(f"{family:28} {ratios['n']:4}" + "".join(f" {ratios[title]:8.2f}" for title in titles))
    lines.append(f"below the floor: {', '.join(ours['below the floor']) or 'none'}")
    for row in ours["rows"][:_WORST]:
        tokens = f"{row['inputs'] or ''}/{row['sequence'] or ''}"
        where = f"{row['model']} on {row['instance']} tp {row['tp']} b{row['batch']} {tokens}"
        lines.append(f"{row['family']:18} {where:76} {row['measured'] * 1e3:9.2f} ms {row['ratio']:6.2f} x")
    return lines + [f"not compiled: {id_}: {reason}" for id_, reason in ours["not compiled"].items()]


def results_page(rows: Sequence[Measured], others: Sequence[Measured], ours: dict[str, Any] | None) -> str:
    """The page of results: a table for each way to leave rows out, and the table of our programs."""
    selection = select([*rows, *others])
    model, _ = leave_out(rows, others, "model")
    instance, _ = leave_out(rows, others, "instance")
    shipped_, _ = compare(rows, None)
    reports = [report(part, {}, None)["families"] for part in (model, instance, shipped_)]
    lines = [
        "# Predictions against published measurements",
        "",
        f"Written by `benchmarks/published.py` on {datetime.now(UTC).date().isoformat()} with the constants of",
        f"{shipped().date}. [prediction.md](../reference/prediction.md) has the terms and the fit,",
        "[timeline.md](../reference/timeline.md) the time of our programs.",
        "",
        f"## {PREDICTED}",
        "",
        "Scored rows of AWS's tables, each predicted by constants that were fitted without the row's model;",
        f"{len(selection.rows)} rows are fitted. `Without instance`: without its instance type. `Shipped`: by the",
        "shipped constants, which have seen the rows. Two figures are the median and the 90 % quantile.",
        "",
        "| Family | Rows | Median | p90 | Worst | Within 1.5x | Ranked right | In interval | Below the floor "
        "| Without instance | Shipped | Roofline | Analytic planner |",
        "|" + " --- |" * 13,
    ]
    for family, part in reports[0].items():
        f = part[PREDICTED]
        ranked = "-" if f["ranking"] is None else f"{f['ranking']:.0%}"
        pairs = [f"{f_['median']:.1%}, {f_['p90']:.1%}" for f_ in (each[family][PREDICTED] for each in reports[1:])]
        plain = [f"{part[name]['median']:.0%}" for name in (ROOFLINE, ANALYTIC)]
        shares = [f"{f[name]:.1%}" for name in ("median", "p90", "worst", "within 1.5x")]
        inside = f"{part['inside the interval']:.0%}"
        cells = (family, str(part["n"]), *shares, ranked, inside, str(f["below the floor"]), *pairs, *plain)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(_results_of_programs(ours) if ours else ()), ""])


def _results_of_programs(ours: dict[str, Any]) -> list[str]:
    """The section of our programs: ratios by family, the farthest rows, and rows without a program."""
    lines = [
        f"## {THIS_PROGRAM[0].upper()}{THIS_PROGRAM[1:]}",
        "",
        "The time of our compiler's program on documented costs, with the host and collectives, divided by the",
        f"measurement. Below the floor: {', '.join(ours['below the floor']) or 'none'}.",
        "",
        "| Family | Rows | Median | p90 | Least | Worst |",
        "|" + " --- |" * 6,
        *(
            f"| {family} | {r['n']} | {r['median']:.2f} | {r['p90']:.2f} | {r['least']:.2f} | {r['worst']:.2f} |"
            for family, r in ours["families"].items()
        ),
        "",
        "The rows with the largest ratios:",
        "",
        "| Family | Model | Instance | tp | Batch | Measured, ms | Ratio |",
        "|" + " --- |" * 7,
        *(
            f"| {row['family']} | {row['model']} | {row['instance']} | {row['tp']} | {row['batch']} | "
            f"{row['measured'] * 1e3:.2f} | {row['ratio']:.2f} |"
            for row in ours["rows"][:_WORST]
        ),
    ]
    reasons = Counter(ours["not compiled"].values())
    if reasons:
        lines += [
            "",
            "Rows without a program:",
            "",
            *(f"- {count}: {reason}" for reason, count in reasons.most_common()),
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--constants", type=Path, help="a file of `nxpipe calibrate --from`, not the shipped one")
    parser.add_argument("--leave-one-out", choices=("model", "instance"))
    parser.add_argument("--leave-one-model-out", action="store_const", const="model", dest="leave_one_out")
    parser.add_argument("--with", type=Path, action="append", default=[], dest="others")
    parser.add_argument("--only", metavar="FAMILY", help="rows of this family")
    parser.add_argument("--programs", metavar="FAMILIES", default="all", help="families to compile: all, none or names")
    parser.add_argument("--cache", type=Path, help="a folder of compiled programs")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write the page of results")
    parser.add_argument("--jobs", type=int, default=2, help="programs that are compiled at once")
    options = parser.parse_args()
    try:
        rows = [row for row in read(options.csv) if options.only in (None, row.configuration.family)]
        if options.leave_one_out:
            others = [row for path in options.others for row in read(path)]
            found, missing = leave_out(rows, others, options.leave_one_out)
        else:
            found, missing = compare(rows, options.constants)
    except InputInvalid as fault:
        print(f"Error: {fault}", file=sys.stderr)
        return 2
    if not found:
        print(f"Error: {options.csv}: no scored row of {options.only or 'a known model'}", file=sys.stderr)
        return 2
    names = options.programs.split(",")
    compiled = [row for row in rows if "all" in names or row.configuration.family in names]
    ours = programs(compiled, jobs=options.jobs, cache=options.cache) if compiled else None
    if options.results:
        others = [row for path in options.others for row in read(path)]
        options.results.write_text(results_page(rows, others, ours), encoding="utf-8")
        return 0
    document = report(found, missing, ours)
    print(json.dumps(document, indent=2) if options.json else page(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
