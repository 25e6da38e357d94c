"""Measurements of the rollout judge: false rollbacks, detection, whole rollouts, and a comparison with peers.

    nice -n 10 python benchmarks/canary.py FOLDER [--rollouts N] [--runs N] [--wholes N] [--only PART]

FOLDER keeps the measurements; existing ones are not repeated, so an interrupted sweep continues, and an empty folder
starts anew. Without --only, the tables are printed and written into docs/guides/canary.md, with the two plots.
"""

import argparse
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from canary_cells import Cells
from canary_peers import RULES, TITLES, caught
from canary_plots import Curve, Panel, drawn

from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.input import plan_of
from nxpipe.pipeline.rollout.planner import UNCHANGED_LATENCY, Slowness
from nxpipe.pipeline.rollout.simulate import Scenario, TrafficModel, simulate

DOCS: Final = Path(__file__).parent.parent / "docs"
RESULTS: Final = DOCS / "results"
BASE: Final = 0.005
PLAN: Final = plan_of(Rollout())
TRAFFIC: Final = (5, 50)
SCALED, TAIL = Slowness(scale=1.2), Slowness(tail=1.5)

# scenario, burst
HEALTHY: Final[tuple[tuple[Scenario, float], ...]] = (
    ("steady", 0.5),
    ("incident", 0.5),
    ("bursty", 0.5),
    ("bursty", 1.0),
)
# rps, name, error rate of the canary, scale of its latencies
FAULTS: Final = (
    (5, "errors 0.5 → 1 %", 0.01, UNCHANGED_LATENCY),
    (5, "errors 0.5 → 2 %", 0.02, UNCHANGED_LATENCY),
    (5, "errors 0.5 → 5 %", 0.05, UNCHANGED_LATENCY),
    (5, "broken: errors 0.5 → 50 %", 0.5, UNCHANGED_LATENCY),
    (5, "p99 + 20 %, all latencies", BASE, SCALED),
    (5, "p99 + 50 %, tail alone", BASE, TAIL),
    (50, "errors 0.5 → 1 %", 0.01, UNCHANGED_LATENCY),
    (50, "errors 0.5 → 2 %", 0.02, UNCHANGED_LATENCY),
    (50, "errors 0.5 → 5 %", 0.05, UNCHANGED_LATENCY),
    (50, "p99 + 20 %, all latencies", BASE, SCALED),
    (50, "p99 + 50 %, tail alone", BASE, TAIL),
)
# base error rate, canary's error rate, scenario
WHOLE: Final[tuple[tuple[float, float, Scenario], ...]] = (
    (BASE, BASE, "steady"),
    (BASE, 0.01, "steady"),
    (BASE, 0.02, "steady"),
    (BASE, 0.05, "steady"),
    (0.001, 0.001, "steady"),
    (0.001, 0.01, "steady"),
    (BASE, 0.02, "late"),
)


def title_of(scenario: str, burst: float) -> str:
    return f"bursts, CV {burst:g}, fitted" if scenario == "bursty" else scenario


def false_rollbacks(cells: Cells, rollouts: int) -> list[str]:
    lines = [
        "False rollbacks of whole rollouts of equal versions (four steps, all metrics, one evaluation a minute),\n"
        "the upper 95 % limit of their rate, and their duration:",
        "",
        "| traffic | 5 rps | 50 rps |",
        "|---|---|---|",
    ]
    for scenario, burst in HEALTHY:
        row = [title_of(scenario, burst)]
        for rps in TRAFFIC:
            world = TrafficModel(scenario, rps, BASE, BASE, burst=burst)
            name = f"healthy-{scenario}-{burst:g}-{rps}-{rollouts}"
            outcome = cells.of(name, partial(_ended, world, rollouts, 1))
            limit = outcome["false_rollback_rate_upper_95"]
            trials, minutes = outcome["rollouts"], outcome["median_minutes"]
            row.append(f"{outcome['rolled_back']} of {trials:,}: at most **{limit:.2%}**; median {minutes:.0f} min")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def whole_rollouts(cells: Cells, runs: int) -> list[str]:
    lines = [
        f"{runs:,} whole rollouts: rolled back / undecided / promoted in %, each with its median of minutes:",
        "",
        "| errors of old → new | 5 rps | 50 rps |",
        "|---|---|---|",
    ]
    for base, error, scenario in WHOLE:
        late = ", from the 50 % step on" if scenario == "late" else ""
        row = [f"{base:.1%} → {error:.1%}{late}"]
        for rps in TRAFFIC:
            world = TrafficModel(scenario, rps, base, error)
            name = f"whole-{scenario}-{base:g}-{error:g}-{rps}-{runs}"
            outcome = cells.of(name, partial(_ended, world, runs, 2))
            row.append(_ends(outcome, runs))
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _ended(world: TrafficModel, rollouts: int, seed: int) -> dict[str, Any]:
    return simulate(PLAN, world, rollouts, seed).as_json()


def _ends(found: dict[str, Any], runs: int) -> str:
    back, promoted = found["median_minutes_rolled_back"], found["median_minutes_promoted"]
    return " / ".join(
        (
            f"{found['rolled_back'] / runs:.1%}" + (f" in {back:.0f}" if back else ""),
            f"{found['undecided'] / runs:.1%}",
            f"{found['promoted'] / runs:.1%}" + (f" in {promoted:.0f}" if promoted else ""),
        )
    )


def one_step(cells: Cells, runs: int) -> list[str]:
    """An hour at a share of 5 %, with every rule on the same minutes."""
    healthy = [
        "One hour at a share of 5 %, all rules on the same minutes. Rollbacks of equal versions, in %:",
        "",
        f"| rule | {' | '.join(f'{rps} rps {scenario}' for rps in TRAFFIC for scenario in ('steady', 'incident'))} |",
        "|---|---|---|---|---|",
    ]
    columns = [
        _minutes(cells, TrafficModel(scenario, rps, BASE, BASE), 4 * runs)
        for rps in TRAFFIC
        for scenario in ("steady", "incident")
    ]
    for rule in RULES:
        rates = [f"{_share(column[rule]):.1%}" for column in columns]
        healthy.append(f"| {TITLES[rule]} | {' | '.join(rates)} |")
    faulty = [
        "",
        "The same hour with a fault: caught in % / median minute (`>`: beyond the hour):",
        "",
        f"| rps | fault | {' | '.join(TITLES[rule] for rule in RULES)} |",
        f"|---|---|{'---|' * len(RULES)}",
    ]
    for rps, name, error, slowness in FAULTS:
        column = _minutes(cells, TrafficModel("steady", rps, BASE, error, slowness), runs)
        faulty.append(f"| {rps} | {name} | {' | '.join(_caught(column[rule]) for rule in RULES)} |")
    return healthy + faulty


def _minutes(cells: Cells, world: TrafficModel, runs: int) -> dict[str, Any]:
    slow = world.slowness
    name = f"step-{world.scenario}-{world.rps}-{world.canary_error:g}-{slow.scale:g}-{slow.tail:g}-{runs}"
    return cells.of(name, lambda: caught(PLAN, world, runs, 3))


def _share(minutes: Sequence[int | None]) -> float:
    return sum(minute is not None for minute in minutes) / len(minutes)


def _caught(minutes: Sequence[int | None]) -> str:
    in_order = sorted(minute if minute is not None else 1000 for minute in minutes)
    median = in_order[len(in_order) // 2]
    return f"{_share(minutes):.0%} / {median if median < 1000 else '>'}"


def plots(cells: Cells, runs: int) -> None:
    def panel(title: str, world: TrafficModel, count: int) -> Panel:
        column = _minutes(cells, world, count)
        return Panel(title, tuple(Curve(TITLES[rule], rule, tuple(column[rule])) for rule in RULES))

    healthy = [
        panel(f"{rps} rps, {scenario}", TrafficModel(scenario, rps, BASE, BASE), 4 * runs)
        for rps in TRAFFIC
        for scenario in ("steady", "incident")
    ]
    faulty = [
        panel(f"{rps} rps, {name}", TrafficModel("steady", rps, BASE, error, slowness), runs)
        for rps, name, error, slowness in FAULTS
        if (rps, name)
        in {
            (5, FAULTS[2][1]),
            (5, FAULTS[4][1]),
            (50, FAULTS[1][1]),
            (50, FAULTS[5][1]),
        }
    ]
    (RESULTS / "canary-healthy.svg").write_text(drawn("Healthy versions rolled back by minute", healthy))
    (RESULTS / "canary-faulty.svg").write_text(drawn("Faulty versions rolled back by minute", faulty))


def into_page(text: str) -> None:
    page = DOCS / "guides" / "canary.md"
    begin, end = "<!-- figures: made by benchmarks/canary.py -->", "<!-- end of figures -->"
    written = re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", page.read_text(), flags=re.DOTALL)
    page.write_text(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--wholes", type=int, default=1_000)
    parser.add_argument("--only", choices=("healthy", "step", "whole"))
    given = parser.parse_args()
    cells = Cells(given.folder)
    parts = {
        "healthy": partial(false_rollbacks, cells, given.rollouts),
        "step": partial(one_step, cells, given.runs),
        "whole": partial(whole_rollouts, cells, given.wholes),
    }
    tables = {name: "\n".join(make()) for name, make in parts.items() if given.only in (None, name)}
    text = "\n\n".join(tables.values())
    print(text)
    if given.only is None:
        into_page(text)
        plots(cells, given.runs)


if __name__ == "__main__":
    main()
