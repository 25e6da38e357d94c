"""Beginning a rollout. Each part of it may be repeated, and nobody else can begin one meanwhile.

The lock is taken for an execution that is not there yet, under the name that it will have: only whoever holds it
moves the new colour's channel. The machine then finds its own name in the lock.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from nxpipe.artifact_store import Published
from nxpipe.pipeline.artifacts.colours import COLOURS, other
from nxpipe.pipeline.canary.plan import Schedule
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.artifacts import Artifacts
from nxpipe.pipeline.rollout.asked import Asked, Candidate
from nxpipe.pipeline.rollout.errors import RolloutRefused
from nxpipe.pipeline.rollout.history import History, history
from nxpipe.pipeline.rollout.lock import Item
from nxpipe.pipeline.rollout.machine import Execution, Machine
from nxpipe.pipeline.rollout.outcome import End, outcome_of
from nxpipe.pipeline.rollout.plans import plan_of

_ABANDONED: Final = timedelta(minutes=5)  # after it, nobody who has taken the lock is still about to start
_MINUTE: Final = 60  # seconds


@dataclass(frozen=True)
class Wanted:
    artifact: Published
    to: str | None
    again: bool
    minute: int  # seconds
    reason: str


@dataclass(frozen=True)
class Begin:
    """A rollout that may begin, decided but for its beginning."""

    name: str
    artifact: Published
    asked: Asked
    history: History
    after: str | None  # an owner of the lock that never came to be


@dataclass(frozen=True)
class ServedAlready:
    """Nothing is to be done: the fleet runs it."""

    colour: str
    candidate: Candidate


def decide(machine: Machine, artifacts: Artifacts, wanted: Wanted, rules: Rollout) -> Begin | Execution | ServedAlready:
    """What to begin; or the same rollout, if it is under way, or has been and is not wanted again."""
    candidate, item = artifacts.candidate(wanted.artifact), machine.record.read()
    owner = machine.execution(item.owner) if item.owner else None
    if owner is not None:
        return _the_same(machine.fleet, owner, candidate)
    old = _whole(machine)
    new = other(old)
    if wanted.to not in (None, new):
        raise RolloutRefused(f"fleet {machine.fleet} runs on {old}, so a rollout goes to {new}; leave out --to")
    if artifacts.run_by(old).request_key == candidate.artifact and not wanted.again:
        return ServedAlready(old, candidate)
    name = f"{candidate.artifact[:12]}-{new}-{candidate.generation}"
    before = machine.execution(machine.execution_arn(name))
    if before is not None and not wanted.again and _was_judged(machine, before):
        return before
    if item.owner not in (None, machine.execution_arn(name)):
        _insist_on_abandoned(machine.fleet, item)
    known = history(machine, old, wanted.minute)
    plan = plan_of(rules, known.latencies)
    asked = Asked(old, new, candidate, plan, pace_of(wanted.minute), artifacts.actor, wanted.reason)
    return Begin(_unused(machine, name), wanted.artifact, asked, known, item.owner)


def begin(machine: Machine, artifacts: Artifacts, what: Begin) -> str:
    """The execution's ARN. If this dies on the way, the same command goes on from there."""
    arn = machine.execution_arn(what.name)
    if not machine.record.lock(arn, after=what.after):
        raise RolloutRefused(
            f"another rollout of fleet {machine.fleet} has begun at this moment; see it with: nxpipe rollout status "
            f"{machine.fleet}"
        )
    try:
        why = f"rollout {what.name}"
        artifacts.keep(what.asked.old, why)
        artifacts.point(what.asked.new, what.artifact, why)
    except BaseException:
        machine.record.unlock(arn)
        raise
    machine.start(what.name, what.asked)
    return arn


def pace_of(minute: int) -> Schedule:
    """The usual one, in minutes of this length."""
    usual = Schedule()
    seconds = {name: getattr(usual, name) * minute / _MINUTE for name in ("period", "poll", "settle", "warm")}
    return replace(usual, **{name: max(1, round(value)) for name, value in seconds.items()})


def _whole(machine: Machine) -> str:
    """The colour that has all traffic, by the rule itself."""
    weights = machine.weights()
    serving = [colour for colour, weight in weights.items() if weight]
    if len(serving) == 1 and serving[0] in COLOURS:
        return serving[0]
    said = ", ".join(f"{colour} {weight}" for colour, weight in weights.items())
    raise RolloutRefused(
        f"the traffic of fleet {machine.fleet} is not wholly with one of {' and '.join(COLOURS)}, but weighed {said}; "
        "bring it home first"
    )


def _unused(machine: Machine, name: str) -> str:
    """An execution's name is used once in 90 days."""
    tried, number = name, 1
    while machine.execution(machine.execution_arn(tried)) is not None:
        number += 1
        tried = f"{name}-{number}"
    return tried


def _was_judged(machine: Machine, before: Execution) -> bool:
    """One that never had any traffic may be tried again by the same words."""
    outcome = outcome_of(machine, before)
    return outcome is None or outcome.end in (End.PROMOTED, End.ROLLED_BACK)


def _insist_on_abandoned(fleet: str, item: Item) -> None:
    """Whoever took the lock, and has started nothing, has died or is at work this moment."""
    if item.since is not None and datetime.now(UTC) - item.since < _ABANDONED:
        raise RolloutRefused(
            f"somebody else began a rollout of fleet {fleet} at {item.since:%H:%M:%S} and is not done with that; "
            f"try again in {_ABANDONED.seconds // 60} minutes"
        )


def _the_same(fleet: str, owner: Execution, candidate: Candidate) -> Execution:
    """The one that is under way, if it is this one."""
    if owner.running and owner.asked and owner.asked.candidate.artifact == candidate.artifact:
        return owner
    raise RolloutRefused(_busy(fleet, owner))


def _busy(fleet: str, owner: Execution) -> str:
    if not owner.running:
        return (
            f"rollout {owner.name} of fleet {fleet} has died, and its watchdog is bringing traffic home; "
            "try again in a minute"
        )
    what = f" of {owner.asked.candidate.name}" if owner.asked else ""
    return (
        f"rollout {owner.name}{what} to fleet {fleet} is under way since {owner.started:%Y-%m-%d %H:%M}; wait for it "
        f"with: nxpipe rollout status {fleet} --wait, or end it with: nxpipe rollout abort {fleet}"
    )
