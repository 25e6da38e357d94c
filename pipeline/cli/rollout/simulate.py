"""`nxpipe rollout simulate`."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.rollout.options import (
    base_error_option,
    canary_error_option,
    configured_plan,
    latency_scale_option,
    latency_tail_option,
    rps_option,
)
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import MissingSoftware
from nxpipe.pipeline.util.escape import style
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.simulate import Summary
    from nxpipe.pipeline.rollout.world import Scenario


@click.command(cls=Command)
@click.option(
    "--scenario",
    type=click.Choice(["steady", "incident", "bursty", "late"]),
    default="steady",
    show_default=True,
    help="What traffic is like.",
)
@rps_option
@base_error_option
@canary_error_option
@latency_scale_option
@latency_tail_option
@click.option(
    "--burst",
    type=click.FloatRange(0.05, 2),
    default=0.5,
    show_default=True,
    help="When bursty: how much a version's error rate varies from minute to minute, as a part of its mean.",
)
@click.option("--rollouts", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="The same one draws the same.")
@config_option
@click.pass_obj
def simulate(
    console: Console,
    scenario: "Scenario",
    rps: float,
    base_error: float,
    canary_error: float | None,
    latency_scale: float,
    latency_tail: float,
    burst: float,
    rollouts: int,
    seed: int,
    config_path: Path,
) -> None:
    """Roll out a thousand times on drawn traffic, by the real judge.

    Steady traffic is a Poisson stream; in an incident, both versions fail ten times as often and slow down for ten
    minutes; bursty errors come in bursts of one version, whose tau is fitted to a day of history first; a late canary
    fails from the step of 50 % on. Without a difference between the versions, every rollback is a false one.

    \b
    Example:
      nxpipe rollout simulate --rps 5 --base-error 0.005
      nxpipe rollout simulate --scenario late --rps 50 --base-error 0.005 --canary-error 0.02 --json
    """
    if find_spec("numpy") is None:
        raise MissingSoftware("numpy", "Drawing traffic", "install nxpipe[compile]")
    from nxpipe.pipeline.rollout.latency import Slowness
    from nxpipe.pipeline.rollout.simulate import simulate as simulated
    from nxpipe.pipeline.rollout.world import World

    error = base_error if canary_error is None else canary_error
    world = World(scenario, rps, base_error, error, Slowness(latency_scale, latency_tail), burst)
    with console.step(f"{rollouts:,} rollouts"):
        summary = simulated(configured_plan(config_path), world, rollouts, seed)
    if console.json:
        console.data(summary.as_json())
    else:
        console.page(_told(summary))


def _told(summary: "Summary") -> str:
    from nxpipe.pipeline.canary.verdict import Decision
    from nxpipe.pipeline.rollout.limits import upper_limit
    from nxpipe.pipeline.rollout.plot import ENDS, when_they_ended
    from nxpipe.pipeline.rollout.simulate import median_minutes

    rows = []
    for decision in (Decision.ADVANCE, Decision.ROLL_BACK, Decision.UNDECIDED):
        ended, every = summary.ended(decision), len(summary.outcomes)
        rows.append(
            (
                style(f"{ENDS[decision].mark} {ENDS[decision].name}", fg=ENDS[decision].colour),
                f"{len(ended):,}",
                f"{len(ended) / every:.2%}",
                f"{upper_limit(len(ended), every):.2%}",
                "-" if not ended else f"{median_minutes(ended):.0f} min",
            )
        )
    ends = table(("end", "rollouts", "share", "upper 95 % limit", "median"), rows)
    return f"{ends}\n\n{when_they_ended(summary.outcomes)}"
