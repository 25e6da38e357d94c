"""`nxpipe rollout plan`, `simulate` and `replay`: the statistics of rollouts, without AWS."""

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.param_types import Amount, Choice, Count, Share
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.exit_codes import RECORD
from nxpipe.pipeline.util.files import MiB, read_file
from nxpipe.pipeline.util.text import style, table

if TYPE_CHECKING:
    from nxpipe.pipeline.canary.plan import CanaryPlan
    from nxpipe.pipeline.canary.record import ReplayedJudgement
    from nxpipe.pipeline.config.serving_fleet import ServingFleet
    from nxpipe.pipeline.rollout.planner import Prospect, StepProspect
    from nxpipe.pipeline.rollout.simulate import Scenario, SimulationSummary


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
@config_option
@click.pass_obj
def plan(console: Console, rps: float, base_error: float, config_path: Path) -> None:
    """Estimate the regressions that a rollout can detect on a service.

    For every step: how long a healthy version takes to advance, how likely a faulty one is detected before the step
    ends undecided, and how many requests fail until then. Approximate, from the drift and variance of the test
    statistic; use simulate for exact rates. For each serving fleet of nxpipe.toml: what its second set of instances
    costs meanwhile, by dated list prices.

    \b
    Example:
      nxpipe rollout plan --rps 5 --base-error 0.005
    """
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.config.root import serving_fleets
    from nxpipe.pipeline.rollout.input import plan_of
    from nxpipe.pipeline.rollout.planner import Service, advice, prospects

    config = load_config(config_path, os.environ, missing_ok=True)
    canary_plan, service = plan_of(config.rollout), Service(rps, base_error)
    steps = prospects(canary_plan, service)
    hints = advice(canary_plan, service, steps)
    minutes = sum(step.advances or canary_plan.bake_max for step in steps)
    costs = [_cost(fleet, config.project.region, minutes) for fleet in serving_fleets(config).values()]
    if console.json:
        document = {"steps": [asdict(step) for step in steps], "advice": list(hints)}
        console.data(document | {"cost": [cost for cost, _ in costs]})
        return
    sentences = "\n".join(sentence for _, sentence in costs)
    parts = (_steps(canary_plan, steps), _faults(canary_plan, steps), "\n".join(hints), sentences)
    console.page("\n\n".join(part for part in parts if part).rstrip())


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


def _steps(plan: "CanaryPlan", prospects: "list[StepProspect]") -> str:
    rows = [
        (
            f"{prospect.share} %",
            f"{step.tolerates:g}",
            "-" if prospect.advances is None else f"{prospect.advances:.0f} min",
            f"{prospect.undecided:.0%}",
            "-" if prospect.detectable_error is None else f"{prospect.detectable_error:.2%}",
        )
        for step, prospect in zip(plan.steps, prospects, strict=True)
    ]
    return table(("share", "tolerates", "healthy version advances", "undecided", "detectable error rate"), rows)


def _faults(plan: "CanaryPlan", prospects: "list[StepProspect]") -> str:
    rows = [
        (fault.fault.name, *(_cell(prospect.faults[index]) for prospect in prospects))
        for index, fault in enumerate(prospects[0].faults)
    ]
    shares = [f"at {prospect.share} %" for prospect in prospects]
    return f"Detected within {plan.bake_max} min, median time, failed requests:\n{table(('fault', *shares), rows)}"


def _cell(prospect: "Prospect") -> str:
    if prospect.median_minutes is None:
        return "never"
    failed = f", {prospect.bad_requests:,.0f}" if prospect.bad_requests else ""
    return f"{prospect.chance:.0%}, {prospect.median_minutes:,.0f} min{failed}"


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
    config_path: Path,
) -> None:
    """Simulate rollouts on random traffic with the production judge.

    Steady traffic is a Poisson stream. In an incident, both versions fail ten times as often and slow down for ten
    minutes. Bursty errors come in bursts of one version, with tau fitted to a day of history. A late canary fails from
    the 50 % step on. A shadow phase of [rollout] is simulated too. If the versions do not differ, every rollback is a
    false one.

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
    with console.step(f"{rollouts:,} rollouts"):
        summary = simulated(configured_plan(config_path), traffic, rollouts, seed)
    if console.json:
        console.data(summary.as_json())
    else:
        console.page(_summary_text(summary))


def _summary_text(summary: "SimulationSummary") -> str:
    from nxpipe.pipeline.canary.judge import Decision
    from nxpipe.pipeline.rollout.render import BAR_STYLES, duration_histogram
    from nxpipe.pipeline.rollout.simulate import median_minutes, upper_limit

    rows = []
    for decision in (Decision.ADVANCE, Decision.ROLL_BACK, Decision.UNDECIDED):
        ended, total = summary.ended(decision), len(summary.outcomes)
        rows.append(
            (
                style(f"{BAR_STYLES[decision].mark} {BAR_STYLES[decision].name}", fg=BAR_STYLES[decision].colour),
                f"{len(ended):,}",
                f"{len(ended) / total:.2%}",
                f"{upper_limit(len(ended), total):.2%}",
                "-" if not ended else f"{median_minutes(ended):.0f} min",
            )
        )
    ends = table(("end", "rollouts", "share", "upper 95 % limit", "median"), rows)
    return f"{ends}\n\n{duration_histogram(summary.outcomes)}"


@click.command(cls=Command)
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def replay(ctx: click.Context, record: Path) -> None:
    """Recompute every verdict of a recorded rollout.

    The first line of RECORD is the plan, each other line an evaluation. Every evaluation must be bit-equal to the one
    computed from the preceding counts, and name the digest of the previous evaluation. Exits with code 35 at the first
    one that differs.

    \b
    Example:
      nxpipe rollout replay search-2027-03-02.jsonl
    """
    from nxpipe.pipeline.canary.record import read, replay

    console: Console = ctx.obj
    try:
        lines = read_file(record, limit=256 * MiB).decode().splitlines()
    except ValueError as error:
        raise click.BadParameter(f"{record}: {error}", param_hint="RECORD") from error
    plan, records = read(lines)
    evaluations = list(replay(plan, records))
    mismatch = next((evaluation for evaluation in evaluations if evaluation.wrong), None)
    if console.json:
        console.data(_as_json(evaluations))
    elif evaluations and not mismatch:
        console.page(_replay_text(plan, evaluations))
    if mismatch:
        console.complain(
            f"evaluation {mismatch.number} of {record} differs from the one computed from its counts: "
            f"{mismatch.wrong}.",
            code=RECORD,
        )
        ctx.exit(RECORD.number)
    console.say(f"{len(evaluations)} evaluations, all reproduced.")


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


def _replay_text(plan: "CanaryPlan", evaluations: "list[ReplayedJudgement]") -> str:
    """The last verdict of each step."""
    from nxpipe.pipeline.canary.judge import explain

    last = {evaluation.judged.verdict.step: evaluation.judged for evaluation in evaluations}
    return "\n".join(explain(plan, judged.evidence, judged.verdict) for judged in last.values())
