"""Options that describe a service and a new version of it."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from nxpipe.pipeline.canary.plan import CanaryPlan


_RATE: Final = click.FloatRange(0, 1, max_open=True)

rps_option = click.option(
    "--rps",
    type=click.FloatRange(0, 1e5, min_open=True),
    required=True,
    help="Requests a second, of both versions together.",
)
base_error_option = click.option(
    "--base-error", type=_RATE, required=True, help="The share of requests that the old version fails."
)
canary_error_option = click.option(
    "--canary-error", type=_RATE, help="The share that the new version fails.  [default: that of the old one]"
)
latency_scale_option = click.option(
    "--latency-scale",
    type=click.FloatRange(0.1, 10),
    default=1.0,
    show_default=True,
    help="By what the new version multiplies every latency.",
)
latency_tail_option = click.option(
    "--latency-tail",
    type=click.FloatRange(1, 10),
    default=1.0,
    show_default=True,
    help="By what it multiplies p99, stretching latencies above p95 alone.",
)


def configured_plan(config_path: Path) -> "CanaryPlan":
    """By [rollout] of the configuration, or by its defaults where there is none."""
    from nxpipe.pipeline.config import load_config
    from nxpipe.pipeline.rollout.input import plan_of

    return plan_of(load_config(config_path, os.environ, missing_ok=True).rollout)
