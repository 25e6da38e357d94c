"""`nxpipe rollout`: a new version gets traffic step by step."""

import click

from nxpipe.pipeline.cli.main import LazyGroup

ROLLOUT_COMMANDS = {
    "abort": (
        "nxpipe.pipeline.cli.rollout.signals:abort",
        "End a rollout: all traffic goes back to the old version.",
    ),
    "approve": (
        "nxpipe.pipeline.cli.rollout.signals:approve",
        "Let a rollout go on whose evidence decides nothing.",
    ),
    "log": (
        "nxpipe.pipeline.cli.rollout.status:log",
        "Show what a rollout saw at each look, and what it made of it.",
    ),
    "pause": ("nxpipe.pipeline.cli.rollout.signals:pause", "Keep a rollout at the step where it is."),
    "plan": (
        "nxpipe.pipeline.cli.rollout.simulate:plan",
        "Say what a rollout could find out on a service, and what not.",
    ),
    "replay": ("nxpipe.pipeline.cli.rollout.simulate:replay", "Derive every verdict of a recorded rollout again."),
    "resume": ("nxpipe.pipeline.cli.rollout.signals:resume", "Let a paused rollout go on."),
    "simulate": (
        "nxpipe.pipeline.cli.rollout.simulate:simulate",
        "Roll out a thousand times on drawn traffic, by the real judge.",
    ),
    "start": (
        "nxpipe.pipeline.cli.rollout.start:start",
        "Move a fleet's traffic to another artifact, step by step.",
    ),
    "status": (
        "nxpipe.pipeline.cli.rollout.status:status",
        "Show where rollouts stand, and wait for the end of one.",
    ),
}


@click.group(cls=LazyGroup, homes=ROLLOUT_COMMANDS)
def rollout() -> None:
    """Give a new version traffic step by step, as evidence allows.

    Every minute, a judge compares the new version with the old one. It bounds how often a healthy version goes back,
    over all steps, metrics and looks; and it never goes on because time has passed. A state machine in the fleet's
    account moves the traffic; these commands start it, watch it and tell it what a person wants, and may die at any
    time.

    \b
    Example:
      nxpipe rollout plan --rps 5 --base-error 0.005
      nxpipe rollout start search bert-base-uncased@4e9ce0 --wait
    """
