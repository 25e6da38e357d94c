"""`nxpipe rollout plan`, `simulate` and `replay`: the statistics of rollouts, without AWS."""

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, minute_option
from nxpipe.pipeline.cli.param_types import Amount, Choice, Count, Share
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.exit_codes import RECORD
from nxpipe.pipeline.util.files import MiB, read_file
from nxpipe.pipeline.util.text import Column, page_width, paragraph, style, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nxpipe.pipeline.canary.plan import CanaryPlan
    from nxpipe.pipeline.canary.record import ReplayedJudgement
    from nxpipe.pipeline.config.serving_fleet import ServingFleet
    from nxpipe.pipeline.rollout.planner import Defect, Prospect, StepProspect
    from nxpipe.pipeline.rollout.simulate import Scenario, SimulationSummary, TrafficModel


_RATE: Final = Share(open_ended=True)

rps_option = click.option(
    "--rps",
    type=Amount(0, 1e5, above=True),
    required=True,
    help="Requests per second, of both versions together.",
)
base_error_option = click.option(
    "--base-error", type=_RATE, required=True, help="The error rate of the old version, as a fraction."
)
canary_error_option = click.option(
    "--canary-error", type=_RATE, help="The error rate of the new version.  [default: that of the old one]"
)
canary_unanswered_option = click.option(
    "--canary-unanswered",
    type=_RATE,
    default=0.0,
    show_default=True,
    help="The share of the new version's requests without a response: its instances hang or crash.",
)
canary_differs_option = click.option(
    "--canary-differs",
    type=_RATE,
    default=0.0,
    show_default=True,
    help="The share of mirrored requests that the new version answers otherwise; seen in a shadow phase only.",
)
latency_scale_option = click.option(
    "--latency-scale",
    type=Amount(0.1, 10),
    default=1.0,
    show_default=True,
    help="The factor of the new version on every latency.",
)
latency_tail_option = click.option(
    "--latency-tail",
    type=Amount(1, 10),
    default=1.0,
    show_default=True,
    help="The factor of the new version on p99; stretches latencies above p95 only.",
)


def configured_plan(config_path: Path) -> "CanaryPlan":
    """The plan of [rollout] in nxpipe.toml, or the default plan."""
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.rollout.input import plan_of

    return plan_of(load_config(config_path, os.environ, missing_ok=True).rollout)


@click.command(cls=Command)
@rps_option
@base_error_option
@minute_option
@click.option("--explain", is_flag=True, help="Add what the figures mean, and the method behind them.")
@config_option
@click.pass_obj
def plan(console: Console, rps: float, base_error: float, minute: str, explain: bool, config_path: Path) -> None:
    """Estimate the regressions that a rollout can find on a service.

    For every step: how long a healthy version takes to advance, how likely a faulty one is found before the step ends
    undecided, and how many requests fail until then. Approximate; simulate gives exact rates. For each serving fleet of
    nxpipe.toml: what its second set of instances costs meanwhile, by dated list prices.

    \b
    Example:
      nxpipe rollout plan --rps 5 --base-error 0.005
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.root import serving_fleets
    from nxpipe.pipeline.rollout.input import plan_of
    from nxpipe.pipeline.rollout.planner import Service, advice, prospects, shadow_prospect

    config = load_config(config_path, os.environ, missing_ok=True)
    fleets = serving_fleets(config).values()
    canary_plan, service = plan_of(config.rollout), Service(rps * int(minute) / 60, base_error)
    steps, shadow = prospects(canary_plan, service), shadow_prospect(canary_plan, service)
    mirrors = not fleets or any(fleet.command is None and not fleet.updates.are_followed for fleet in fleets)
    hints = advice(canary_plan, service, steps, mirrors=mirrors)
    minutes = sum(step.advances or canary_plan.bake_max for step in steps)
    costs = [_cost(fleet, config.project.region, minutes) for fleet in fleets]
    if console.json:
        document = {"steps": [asdict(step) for step in steps], "shadow": shadow and asdict(shadow)}
        console.data(document | {"advice": list(hints), "cost": [cost for cost, _ in costs]})
        return
    phases = [shadow, *steps] if shadow else steps
    width = page_width()
    parts = [
        _text(f"Expected at {rps:g} requests a second with an error rate of {_percent(base_error)}:", width),
        _steps(canary_plan, phases, width),
        _faults(canary_plan, phases, width),
        *(_text(hint, width) for hint in hints),
        *(_text(sentence, width) for _, sentence in costs),
        *([_method(canary_plan, width)] if explain else []),
    ]
    console.page("\n\n".join(part for part in parts if part).rstrip())


def _text(text: str, width: int) -> str:
    return "\n".join(paragraph(text, width))


def _cost(fleet: "ServingFleet", region: str | None, minutes: float) -> tuple[dict[str, Any], str]:
    """What the instances of the new version cost while both versions run: as many as those of the old one."""
    from nxpipe.pipeline.config.prices import load_prices

    prices, type_, count = load_prices(), fleet.instance_types[0], fleet.size.desired
    price = prices.price(region, type_)
    document: dict[str, Any] = {"fleet": fleet.name, "instances": count, "type": type_, "minutes": minutes}
    start = f"Fleet {fleet.name}: {count} more {type_} while both versions run, {minutes:,.0f} min if it is healthy"
    if price is None:
        where = region or "a region that nxpipe.toml does not name"
        return document | {"dollars": None}, f"{start}: no price on demand is known in {where}"
    dollars = count * price.hourly * minutes / 60
    dated = {"dollars": dollars, "price_date": price.date.isoformat()}
    return document | dated, f"{start}: ${dollars:,.2f}, on demand, prices of {price.date}"


def _steps(plan: "CanaryPlan", phases: "list[StepProspect]", width: int) -> str:
    rows = [
        (
            _name(plan, number),
            "rarely" if prospect.advances is None else f"{prospect.advances:.0f} min",
            _percent(prospect.undecided, 0),
            f"{phase.tolerates:g}x",
            "-" if prospect.detectable_error is None else _percent(prospect.detectable_error),
        )
        for number, (phase, prospect) in enumerate(zip(plan.phases, phases, strict=True))
    ]
    title = (
        "When a healthy version advances, and which errors a step tolerates (in times those of the stable version) and "
        "finds (as a share of requests):"
    )
    header = ("traffic", "advances after", "undecided", "tolerates up to", "finds from")
    return f"{_text(title, width)}\n{table(header, rows, width)}"


def _faults(plan: "CanaryPlan", phases: "list[StepProspect]", width: int) -> str:
    rows = []
    for index, each in enumerate(phases[0].faults):
        for number, phase in enumerate(phases):
            limit = plan.bake(number)[1]
            rows.append(
                ("" if number else _defect(each.fault, width), _name(plan, number), *_cells(phase.faults[index], limit))
            )
    title = "Defects that begin with a step: how often they are found within it, and what they cost until then:"
    header = (Column("defect", whole=True), "traffic", "found", "median time", "failed requests")
    return f"{_text(title, width)}\n{table(header, rows, width)}"


def _name(plan: "CanaryPlan", phase: int) -> str:
    shadow = plan.shadow if plan.is_shadow(phase) else None
    return f"shadow {shadow.percent:g} %" if shadow else f"{plan.phases[phase].weight} %"


def _defect(fault: "Defect", width: int) -> str:
    return fault.name if fault.name.startswith("p99") or width < 80 else f"{fault.name}, {100 * fault.error:.2g} %"


def _cells(prospect: "Prospect", limit: int) -> tuple[str, str, str]:
    """Requests fail until the defect is found, or until the step ends."""
    if prospect.median_minutes is None:
        return "0 %", "-", "-"
    median, failed = prospect.median_minutes, prospect.bad_requests or 0.0
    if median <= limit:
        return _percent(prospect.chance, 0), f"{median:,.0f} min", f"{failed:,.0f}"
    return _percent(prospect.chance, 0), f">{limit} min", f"{failed * limit / median:,.0f}"


def _percent(part: float, digits: int = 2) -> str:
    return f"{100 * part:.{digits}f} %"


def _method(plan: "CanaryPlan", width: int) -> str:
    """What `--explain` adds."""
    texts = (
        f"A step advances when the evidence that it tolerates the new version reaches odds of {1 / plan.beta:g} to 1 "
        f"(beta), and not before {plan.bake_min} min. It is enough that the error rate is below "
        f"{_percent(plan.objective)} (max_error_rate), or that the odds ratio of the errors is below what the step "
        f"tolerates: at a share s of traffic, 1 + 0.5 / s, which raises the errors of all traffic by half.",
        f"A rollout is rolled back when the evidence of a regression reaches {1 / plan.alpha:g} to 1 (alpha), in any "
        "minute. A version as good as the stable one is rolled back in at most "
        f"{_percent(plan.alpha, 0)} of rollouts, however often the evidence is looked at.",
        f"Found: the chance that the evidence reaches that within the {plan.bake_max} min of a step (bake_max), for a "
        "defect that begins with it. Errors found from: the smallest error rate that is found in 80 % of rollouts.",
    )
    return "\n\n".join(_text(text, width) for text in texts)


@click.command(cls=Command)
@click.option(
    "--scenario",
    type=Choice(["steady", "incident", "bursty", "late"]),
    default="steady",
    show_default=True,
    help="The traffic model.",
)
@rps_option
@base_error_option
@canary_error_option
@canary_unanswered_option
@canary_differs_option
@latency_scale_option
@latency_tail_option
@click.option(
    "--burst",
    type=Amount(0.05, 2),
    default=0.5,
    show_default=True,
    help="For bursty traffic: the standard deviation of the error rate per minute, relative to its mean.",
)
@click.option("--rollouts", type=Count(1, 1_000_000), default=1000, show_default=True, help="The number of rollouts.")
@click.option("--seed", type=Count(0), default=0, show_default=True, help="The random seed.")
@click.option(
    "--record",
    "record_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Simulate one rollout, and write its record to this file.",
)
@config_option
@click.pass_obj
def simulate(
    console: Console,
    scenario: "Scenario",
    rps: float,
    base_error: float,
    canary_error: float | None,
    canary_unanswered: float,
    canary_differs: float,
    latency_scale: float,
    latency_tail: float,
    burst: float,
    rollouts: int,
    seed: int,
    record_path: Path | None,
    config_path: Path,
) -> None:
    """Simulate rollouts on random traffic with the production judge.

    Steady traffic is a Poisson stream. In an incident, both versions fail ten times as often and slow down for ten
    minutes. Bursty errors come in bursts of one version, whose spread is fitted to a day of history. A late canary
    fails from the 50 % step on. A shadow phase of [rollout] is simulated too. If the versions do not differ, every
    rollback is a false one.

    With --record, one rollout is simulated with the delays of CloudWatch, and its record written for `nxpipe rollout
    replay`.

    \b
    Example:
      nxpipe rollout simulate --rps 5 --base-error 0.005
      nxpipe rollout simulate --rps 50 --base-error 0.005 --canary-unanswered 0.3
      nxpipe rollout simulate --scenario late --rps 50 --base-error 0.005 --canary-error 0.02 --json
    """
    if find_spec("numpy") is None:
        raise MissingSoftware("numpy", "nxpipe rollout simulate", "install nxpipe[compile]")
    from nxpipe.pipeline.rollout.planner import Slowness
    from nxpipe.pipeline.rollout.simulate import TrafficModel
    from nxpipe.pipeline.rollout.simulate import simulate as simulated

    error_rate = base_error if canary_error is None else canary_error
    slowness = Slowness(latency_scale, latency_tail)
    traffic = TrafficModel(scenario, rps, base_error, error_rate, slowness, burst, canary_unanswered, canary_differs)
    if record_path is not None:
        _record(console, record_path, configured_plan(config_path), traffic, seed)
        return
    with console.step(f"{rollouts:,} rollouts"):
        summary = simulated(configured_plan(config_path), traffic, rollouts, seed)
    if console.json:
        console.data(summary.as_json())
    else:
        console.page(_summary_text(summary))


def _record(console: Console, path: Path, plan: "CanaryPlan", traffic: "TrafficModel", seed: int) -> None:
    from nxpipe.pipeline.rollout.simulate import record_rollout
    from nxpipe.pipeline.util.files import write_whole

    lines = record_rollout(plan, traffic, seed)
    write_whole(path, "\n".join([*lines, ""]).encode())
    if console.json:
        console.data({"record": str(path), "evaluations": len(lines) - 1})
    else:
        console.result(f"{path}: {len(lines) - 1} evaluations; show it with: nxpipe rollout replay {path}")


def _summary_text(summary: "SimulationSummary") -> str:
    from nxpipe.pipeline.canary.judge import Decision
    from nxpipe.pipeline.rollout.render import BAR_STYLES, duration_histogram
    from nxpipe.pipeline.rollout.simulate import median_minutes, upper_limit

    width, rows = page_width(), []
    for decision in (Decision.ADVANCE, Decision.ROLL_BACK, Decision.UNDECIDED):
        ended, total = summary.ended(decision), len(summary.outcomes)
        rows.append(
            (
                style(f"{BAR_STYLES[decision].mark} {BAR_STYLES[decision].name}", fg=BAR_STYLES[decision].colour),
                f"{len(ended):,}",
                _percent(len(ended) / total),
                _percent(upper_limit(len(ended), total)),
                "-" if not ended else f"{median_minutes(ended):.0f} min",
            )
        )
    header = ("end", "rollouts", "share", "at most (95 % sure)", "median time")
    histogram = duration_histogram(summary.outcomes, width)
    return f"{table(header, rows, width)}\n\nMinutes until the end:\n{histogram}"


SAMPLES: Final = {
    "rolled-back": "its errors rise from 0.2 % to 2.5 % at 20 requests a second",
    "slower": "its latencies are 30 % longer at 20 requests a second",
    "promoted": "it is as good as the stable version, at 20 requests a second",
}


@click.command(cls=Command)
@click.argument("record", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--sample",
    type=Choice(list(SAMPLES)),
    help="A record that comes with nxpipe, of a simulated rollout, instead of RECORD.",
)
@click.option("--explain", is_flag=True, help="Add the odds and intervals behind the last verdict of each step.")
@click.pass_context
def replay(ctx: click.Context, record: Path | None, sample: str | None, explain: bool) -> None:
    """Recompute every verdict of a recorded rollout.

    The first line of RECORD is the plan, each other line an evaluation, as `nxpipe rollout log --json` prints them.
    Every evaluation must be bit-equal to the one computed from the preceding counts, and name the digest of the
    previous evaluation. Exits with code 35 at the first one that differs.

    \b
    Example:
      nxpipe rollout replay --sample rolled-back
      nxpipe rollout replay search-2027-03-02.jsonl
    """
    from nxpipe.pipeline.canary.record import read, replay

    console: Console = ctx.obj
    if (record is None) == (sample is None):
        raise click.UsageError("pass either RECORD or --sample", ctx)
    path = record or sample_path(str(sample))
    try:
        lines = read_file(path, limit=256 * MiB).decode().splitlines()
    except ValueError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="RECORD") from error
    plan, records = read(lines)
    evaluations = list(replay(plan, records))
    mismatch = next((evaluation for evaluation in evaluations if evaluation.wrong), None)
    if console.json:
        console.data(_as_json(evaluations))
    elif evaluations and not mismatch:
        console.page(_replay_text(plan, records, evaluations if explain else ()))
    if mismatch:
        console.complain(
            f"evaluation {mismatch.number} of {path} differs from the one computed from its counts: {mismatch.wrong}.",
            code=RECORD,
        )
        ctx.exit(RECORD.number)
    if sample:
        console.say(f"A rollout simulated by nxpipe with the judge that runs on AWS: {SAMPLES[sample]}.")
    console.say(f"{len(evaluations)} evaluations, all reproduced.")


def sample_path(name: str) -> Path:
    return Path(__file__).parents[2] / "rollout" / "samples" / f"{name}.jsonl"


def _as_json(evaluations: "list[ReplayedJudgement]") -> list[dict[str, object]]:
    return [
        {
            "number": evaluation.number,
            "verdict": evaluation.judged.verdict.as_json(),
            "same": evaluation.wrong is None,
            "why": evaluation.wrong,
        }
        for evaluation in evaluations
    ]


def _replay_text(plan: "CanaryPlan", records: "list[dict[str, Any]]", explained: "Sequence[ReplayedJudgement]") -> str:
    """The verdict, the phases, and with --explain the figures of the last verdict of each."""
    from nxpipe.pipeline.rollout.course import Course, EvaluationRecord
    from nxpipe.pipeline.rollout.render import course_page, explanations

    course = Course(plan).after(EvaluationRecord(record, "") for record in records)
    parts = [course_page(course, page_width())]
    if explained:
        parts.append(explanations(course, [evaluation.judged for evaluation in explained]))
    return "\n\n".join(parts)
