"""Beginning a rollout. Each part of it may be repeated, and nobody else can begin one meanwhile.

The lock is taken for an execution that is not there yet, under the name that it will have: only whoever holds it
moves the new colour's channel. The machine then finds its own name in the lock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from nxpipe.artifact_store import Published
from nxpipe.pipeline.artifacts.channels import COLOURS, other
from nxpipe.pipeline.canary.counts import LATENCIES
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.config import Rollout
from nxpipe.pipeline.rollout.aws import (
    MIN_TIMED_REQUESTS,
    BaselineHistory,
    RecordItem,
    RolloutExecution,
    StateMachine,
    baseline_history,
)
from nxpipe.pipeline.rollout.context import FleetArtifacts, RolloutContext
from nxpipe.pipeline.rollout.finish import move_fleet_channel
from nxpipe.pipeline.rollout.input import RolloutCandidate, RolloutInput, plan_of, schedule_of
from nxpipe.pipeline.rollout.planner import POWER, Service, prospects
from nxpipe.pipeline.rollout.status import RolloutEnd, outcome_of
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import RolloutRefused

_ABANDONED: Final = timedelta(minutes=5)  # after it, nobody who has taken the lock is still about to start


@dataclass(frozen=True)
class StartRequest:
    artifact: Published
    to: str | None
    again: bool
    minute: int  # seconds
    reason: str


@dataclass(frozen=True)
class StartDecision:
    """A rollout that may begin, decided but for its beginning."""

    name: str
    artifact: Published
    asked: RolloutInput
    history: BaselineHistory
    after: str | None  # an owner of the lock that never came to be


@dataclass(frozen=True)
class AlreadyServed:
    """Nothing is to be done: the fleet runs it."""

    colour: str
    candidate: RolloutCandidate


def decide(
    machine: StateMachine, artifacts: FleetArtifacts, wanted: StartRequest, rules: Rollout
) -> StartDecision | RolloutExecution | AlreadyServed:
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
        return AlreadyServed(old, candidate)
    name = f"{candidate.artifact[:12]}-{new}-{candidate.generation}"
    before = machine.execution(machine.execution_arn(name))
    if before is not None and not wanted.again and _was_judged(machine, before):
        return before
    if item.owner not in (None, machine.execution_arn(name)):
        _insist_on_abandoned(machine.fleet, item)
    known = baseline_history(machine, old, wanted.minute)
    plan = plan_of(rules, known.latencies)
    asked = RolloutInput(old, new, candidate, plan, schedule_of(wanted.minute), artifacts.actor, wanted.reason)
    return StartDecision(_unused(machine, name), wanted.artifact, asked, known, item.owner)


def start_execution(machine: StateMachine, artifacts: FleetArtifacts, what: StartDecision) -> str:
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


def _whole(machine: StateMachine) -> str:
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


def _unused(machine: StateMachine, name: str) -> str:
    """An execution's name is used once in 90 days."""
    tried, number = name, 1
    while machine.execution(machine.execution_arn(tried)) is not None:
        number += 1
        tried = f"{name}-{number}"
    return tried


def _was_judged(machine: StateMachine, before: RolloutExecution) -> bool:
    """One that never had any traffic may be tried again by the same words."""
    outcome = outcome_of(machine, before)
    return outcome is None or outcome.end in (RolloutEnd.PROMOTED, RolloutEnd.ROLLED_BACK)


def _insist_on_abandoned(fleet: str, item: RecordItem) -> None:
    """Whoever took the lock, and has started nothing, has died or is at work this moment."""
    if item.since is not None and datetime.now(UTC) - item.since < _ABANDONED:
        raise RolloutRefused(
            f"somebody else began a rollout of fleet {fleet} at {item.since:%H:%M:%S} and is not done with that; "
            f"try again in {_ABANDONED.seconds // 60} minutes"
        )


def _the_same(fleet: str, owner: RolloutExecution, candidate: RolloutCandidate) -> RolloutExecution:
    """The one that is under way, if it is this one."""
    if owner.running and owner.asked and owner.asked.candidate.artifact == candidate.artifact:
        return owner
    raise RolloutRefused(_busy(fleet, owner))


def _busy(fleet: str, owner: RolloutExecution) -> str:
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


@dataclass(frozen=True)
class StartedRollout:
    """By this call, or by the same words before."""

    arn: str
    is_over: bool


def start_rollout(console: Console, one: RolloutContext, wanted: StartRequest) -> StartedRollout | AlreadyServed:
    """What the last one may have left to do is done first."""
    move_fleet_channel(one, one.watcher.status())
    decided = decide(one.machine, one.artifacts, wanted, one.config.rollout)
    if isinstance(decided, AlreadyServed):
        return decided
    if isinstance(decided, RolloutExecution):
        _already(console, decided)
        return StartedRollout(decided.arn, is_over=not decided.running)
    _tell(console, one, decided)
    return StartedRollout(start_execution(one.machine, one.artifacts, decided), is_over=False)


def report_already_served(console: Console, one: RolloutContext, found: AlreadyServed) -> None:
    sentence = f"Fleet {one.fleet.name} runs {found.candidate.name} already, on {found.colour}."
    if console.json:
        console.data({"fleet": one.fleet.name, "phase": "none", "artifact": vars(found.candidate)})
    else:
        console.result(sentence)


def _already(console: Console, before: RolloutExecution) -> None:
    if before.running:
        console.say(f"Rollout {before.name} of it is under way already.")
    else:
        console.say(f"Rollout {before.name} of it has been; start it once more with --again.")


def _tell(console: Console, one: RolloutContext, what: StartDecision) -> None:
    asked = what.asked
    console.say(f"Rollout {what.name} of fleet {one.fleet.name}: {asked.candidate.name}, {asked.old} -> {asked.new}")
    for line in [
        *_steps(asked.plan, asked.pace.final),
        *_latencies(what.history),
        *_prospects(asked.plan, what.history, asked.pace.period),
    ]:
        console.say(f"  {line}")


def _steps(plan: CanaryPlan, final: int) -> Iterator[str]:
    shares = ", ".join(f"{step.weight} %" for step in plan.steps)
    yield f"{shares} of traffic, each for {plan.bake_min} to {plan.bake_max} minutes; then all of it, for {final}"
    yield (
        f"back at {1 / plan.alpha:g} to 1 that it is worse; on at {1 / plan.beta:g} to 1 that it is not, or that it "
        f"fails less than {plan.objective:.3g} of requests"
    )


def _latencies(known: BaselineHistory) -> Iterator[str]:
    if known.latencies:
        frozen = ", ".join(
            f"{name} {seconds * 1000:.4g} ms" for name, seconds in zip(LATENCIES, known.latencies, strict=True)
        )
        yield f"slower counts from: {frozen}; frozen from {known.timed} requests"
    else:
        yield (
            f"latency is not judged: the baseline has {known.timed} timed requests; its p99 needs {MIN_TIMED_REQUESTS}"
        )


def _prospects(plan: CanaryPlan, known: BaselineHistory, minute: int) -> Iterator[str]:
    """By the planner, on the traffic that there is; a minute of the plan may have less seconds than sixty."""
    if not known.rps:
        yield "nothing can be said of what it will find: the old version had no traffic lately"
        return
    # A version without an error has some rate all the same; a hundredth of what it may have is a guess that is said.
    guess = max(known.error_rate, plan.objective / 100)
    yield f"at {known.rps:.3g} requests a second, of which {guess:.2g} fail:"
    rps = known.rps * minute / 60
    found = prospects(plan, Service(rps, guess))
    for each in found:
        ends = f"over in about {each.advances:.0f} minutes" if each.advances else "hardly ever over"
        missed = [fault.fault.name for fault in each.faults if fault.chance < POWER and _judged(plan, fault.fault.name)]
        yield f"  {each.share} %: {ends} if nothing is wrong" + (
            f"; does not see {', '.join(missed)}" if missed else ""
        )
    if any(fault.chance < POWER for fault in found[0].faults if _judged(plan, fault.fault.name)):
        yield f"what would: nxpipe rollout plan --rps {rps:.3g} --base-error {guess:.2g}"


def _judged(plan: CanaryPlan, fault: str) -> bool:
    return bool(plan.latencies) or not fault.startswith("p99")
