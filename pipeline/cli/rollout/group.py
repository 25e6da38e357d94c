"""`nxpipe rollout`: the group of the commands for canary rollouts."""

import click

from nxpipe.pipeline.cli.main import LazyGroup

ROLLOUT_COMMANDS = {
    "abort": (
        "nxpipe.pipeline.cli.rollout.signals:abort",
        "Abort a rollout: all traffic returns to the old version.",
    ),
    "approve": (
        "nxpipe.pipeline.cli.rollout.signals:approve",
        "Advance a rollout whose step ended undecided.",
    ),
    "log": (
        "nxpipe.pipeline.cli.rollout.status:log",
        "Show the evaluations of a rollout.",
    ),
    "pause": ("nxpipe.pipeline.cli.rollout.signals:pause", "Pause a rollout at its current step."),
    "plan": (
        "nxpipe.pipeline.cli.rollout.simulate:plan",
        "Estimate the regressions that a rollout can detect on a service.",
    ),
    "replay": ("nxpipe.pipeline.cli.rollout.simulate:replay", "Recompute every verdict of a recorded rollout."),
    "resume": ("nxpipe.pipeline.cli.rollout.signals:resume", "Resume a paused rollout."),
    "simulate": (
        "nxpipe.pipeline.cli.rollout.simulate:simulate",
        "Simulate rollouts on random traffic with the production judge.",
    ),
    "start": (
        "nxpipe.pipeline.cli.rollout.start:start",
        "Start a canary rollout of an artifact on a fleet.",
    ),
    "status": (
        "nxpipe.pipeline.cli.rollout.status:status",
        "Show the state of rollouts, or wait for one to end.",
    ),
}


@click.group(cls=LazyGroup, homes=ROLLOUT_COMMANDS)
def rollout() -> None:
    """Roll out new versions by canary: traffic moves in steps, as evidence allows.

    Every minute, a sequential test compares the new version with the old one. It bounds the false-rollback rate over
    all steps, metrics and evaluations, and never advances because time has passed. A Step Functions state machine moves
    the traffic; these commands start, watch and control it, and may be killed at any time.

    \b
    Example:
      nxpipe rollout plan --rps 5 --base-error 0.005
      nxpipe rollout start search bert-base-uncased@4e9ce0 --wait
    """
