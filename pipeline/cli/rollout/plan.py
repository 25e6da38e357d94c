"""`nxpipe rollout plan`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option
from nxpipe.pipeline.cli.rollout.options import base_error_option, configured_plan, rps_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.pipeline.canary.plan import Plan
    from nxpipe.pipeline.rollout.planner import Prospect, StepProspect


@click.command(cls=Command)
@rps_option
@base_error_option
@config_option
@click.pass_obj
def plan(console: Console, rps: float, base_error: float, config_path: Path) -> None:
    """Say what a rollout could find out on a service, and what not.

    For every step: how long a healthy version takes, how often a faulty one is found before the step asks a person, and
    how many requests it fails until then. Approximate, from the drift and variance of the judge's bets; to be exact,
    simulate.

    \b
    Example:
      nxpipe rollout plan --rps 5 --base-error 0.005
    """
    from nxpipe.pipeline.rollout.planner import Service, advice, prospects

    chosen, service = configured_plan(config_path), Service(rps, base_error)
    found = prospects(chosen, service)
    said = advice(chosen, service, found)
    if console.json:
        console.data({"steps": [asdict(each) for each in found], "advice": list(said)})
        return
    console.page("\n\n".join((_steps(chosen, found), _faults(chosen, found), "\n".join(said))).rstrip())


def _steps(plan: "Plan", found: "list[StepProspect]") -> str:
    rows = [
        (
            f"{each.share} %",
            f"{step.tolerates:g}",
            "-" if each.advances is None else f"{each.advances:.0f} min",
            f"{each.undecided:.0%}",
            "-" if each.detectable_error is None else f"{each.detectable_error:.2%}",
        )
        for step, each in zip(plan.steps, found, strict=True)
    ]
    return table(("share", "tolerates", "a healthy version advances", "undecided", "errors found from"), rows)


def _faults(plan: "Plan", found: "list[StepProspect]") -> str:
    rows = [(fault.fault.name, *(_cell(each.faults[at]) for each in found)) for at, fault in enumerate(found[0].faults)]
    shares = [f"at {each.share} %" for each in found]
    return f"Found within {plan.bake_max} min, median, requests failed:\n{table(('fault', *shares), rows)}"


def _cell(prospect: "Prospect") -> str:
    if prospect.median_minutes is None:
        return "never"
    failed = f", {prospect.bad_requests:,.0f}" if prospect.bad_requests else ""
    return f"{prospect.chance:.0%}, {prospect.median_minutes:,.0f} min{failed}"
