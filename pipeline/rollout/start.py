"""Start of a rollout. Every step may be repeated, and no other rollout of the fleet can start meanwhile.

The order of the steps makes this safe: the lock, for an execution that does not exist yet; the channels of both
environments; then the execution, whose name follows from candidate, environment and generation of the fleet's channel.
A command that is killed leaves a lock whose owner was never started. The same command takes the lock over at once and
continues; any other command takes it over after five minutes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from nxpipe.artifact_store import Published
from nxpipe.pipeline.artifacts.channels import ENVIRONMENTS, ProgramHost, other_environment
from nxpipe.pipeline.canary.metrics import LATENCIES
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
from nxpipe.pipeline.rollout.follow import move_fleet_channel
from nxpipe.pipeline.rollout.input import RolloutCandidate, RolloutInput, plan_of, schedule_of
from nxpipe.pipeline.rollout.planner import POWER, Service, StepProspect, percent, prospects, shadow_prospect
from nxpipe.pipeline.rollout.status import RolloutEnd, outcome_of
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import RolloutRefused

_ABANDONED: Final = timedelta(minutes=5)  # older locks without an execution are taken over


@dataclass(frozen=True)
class StartRequest:
    artifact: Published
    to: str | None
    again: bool
    minute: int  # seconds
    reason: str
    without: tuple[str, ...] = ()  # kinds of evidence that the promotions do without


@dataclass(frozen=True)
class StartDecision:
    """A rollout that may start; nothing was changed yet."""

    name: str
    artifact: Published
    input: RolloutInput
    history: BaselineHistory
    after: str | None  # owner of the lock that was never started


@dataclass(frozen=True)
class AlreadyServed:
    """The fleet already runs the candidate."""

    colour: str
    candidate: RolloutCandidate


def decide(
    machine: StateMachine, artifacts: FleetArtifacts, request: StartRequest, rules: Rollout
) -> StartDecision | RolloutExecution | AlreadyServed:
    """The rollout to start; or the same rollout if it runs, or has ended and --again was not passed."""
    candidate, item = artifacts.candidate(request.artifact), machine.record.read()
    owner = machine.execution(item.owner) if item.owner else None
    if owner is not None:
        return _same_rollout(machine.fleet, owner, candidate)
    old = _serving_environment(machine)
    new = other_environment(old)
    if request.to not in (None, new):
        raise RolloutRefused(f"fleet {machine.fleet} runs on {old}, so a rollout goes to {new}; omit --to")
    if artifacts.running_artifact(old).request_key == candidate.artifact and not request.again:
        return AlreadyServed(old, candidate)
    # The name follows from the candidate and the state of the channel, so the same command finds its own execution.
    name = f"{candidate.artifact[:12]}-{new}-{candidate.generation}"
    before = machine.execution(machine.execution_arn(name))
    if before is not None and not request.again and _was_judged(machine, before):
        return before
    if item.owner not in (None, machine.execution_arn(name)):
        _require_abandoned(machine.fleet, item)
    known = baseline_history(machine, old, request.minute)
    plan = plan_of(rules, known.latencies)
    pace = schedule_of(request.minute, artifacts.fleet.ready_within)
    rollout = RolloutInput(old, new, candidate, plan, pace, artifacts.actor, request.reason, request.without)
    return StartDecision(_free_name(machine, name), request.artifact, rollout, known, item.owner)


def start_execution(machine: StateMachine, artifacts: FleetArtifacts, what: StartDecision) -> str:
    """Starts the execution and returns its ARN. After a kill, the same command continues."""
    arn = machine.execution_arn(what.name)
    if not machine.record.lock(arn, after=what.after):
        raise RolloutRefused(
            f"another rollout of fleet {machine.fleet} has just acquired the lock; see it with: nxpipe rollout status "
            f"{machine.fleet}"
        )
    try:
        why = f"rollout {what.name}"
        artifacts.pin(what.input.old, why)
        artifacts.promote(what.input.new, what.artifact, why, what.input.waiver)
    except BaseException:
        machine.record.unlock(arn)
        raise
    machine.start(what.name, what.input)
    return arn


def _serving_environment(machine: StateMachine) -> str:
    """The environment with all traffic, by the listener rule itself."""
    weights = machine.weights()
    serving = [colour for colour, weight in weights.items() if weight]
    if len(serving) == 1 and serving[0] in ENVIRONMENTS:
        return serving[0]
    weighed = ", ".join(f"{colour} {weight}" for colour, weight in weights.items())
    raise RolloutRefused(
        f"the traffic of fleet {machine.fleet} is split ({weighed}); "
        f"shift all of it to one of {' and '.join(ENVIRONMENTS)} first"
    )


def _free_name(machine: StateMachine, name: str) -> str:
    """A free name: Step Functions reserves the name of an execution for 90 days."""
    tried, number = name, 1
    while machine.execution(machine.execution_arn(tried)) is not None:
        number += 1
        tried = f"{name}-{number}"
    return tried


def _was_judged(machine: StateMachine, before: RolloutExecution) -> bool:
    """False for a rollout that never had traffic, which the same command may start again."""
    outcome = outcome_of(machine, before)
    return outcome is None or outcome.end in (RolloutEnd.PROMOTED, RolloutEnd.ROLLED_BACK)


def _require_abandoned(fleet: str, item: RecordItem) -> None:
    """The owner of the lock was never started: its command was killed, or is about to start it."""
    if item.since is not None and datetime.now(UTC) - item.since < _ABANDONED:
        raise RolloutRefused(
            f"another rollout of fleet {fleet} acquired the lock at {item.since:%H:%M:%S}; "
            f"retry in {_ABANDONED.seconds // 60} min"
        )


def _same_rollout(fleet: str, owner: RolloutExecution, candidate: RolloutCandidate) -> RolloutExecution:
    """The running rollout, if it is of the same candidate."""
    if owner.running and owner.input and owner.input.candidate.artifact == candidate.artifact:
        return owner
    raise RolloutRefused(_busy(fleet, owner))


def _busy(fleet: str, owner: RolloutExecution) -> str:
    # A failed execution still owns the lock, and its watchdog acts before any new rollout: it restores all traffic to
    # one environment, which a rollout needs to start from. It takes the lock over and releases it.
    if not owner.running:
        return f"rollout {owner.name} of fleet {fleet} failed, and its watchdog is rolling back; retry in a minute"
    what = f" of {owner.input.candidate.name}" if owner.input else ""
    return (
        f"rollout {owner.name}{what} to fleet {fleet} has been running since {owner.started:%Y-%m-%d %H:%M}; wait "
        f"with: nxpipe rollout status {fleet} --wait, or abort it with: nxpipe rollout abort {fleet}"
    )


@dataclass(frozen=True)
class StartedRollout:
    """A rollout that this call or an earlier one with the same arguments has started."""

    arn: str
    is_over: bool


def start_rollout(console: Console, context: RolloutContext, request: StartRequest) -> StartedRollout | AlreadyServed:
    """Starts the requested rollout. First it completes the promotion of the previous rollout, if that is pending."""
    move_fleet_channel(context, context.watcher.status())
    decided = decide(context.machine, context.artifacts, request, context.config.rollout)
    if isinstance(decided, AlreadyServed):
        return decided
    if isinstance(decided, RolloutExecution):
        _already(console, decided)
        return StartedRollout(decided.arn, is_over=not decided.running)
    _report_start(console, context, decided)
    return StartedRollout(start_execution(context.machine, context.artifacts, decided), is_over=False)


def report_already_served(console: Console, context: RolloutContext, served: AlreadyServed) -> None:
    sentence = f"Fleet {context.fleet.name} already runs {served.candidate.name} on {served.colour}."
    if console.json:
        console.data({"fleet": context.fleet.name, "phase": "none", "artifact": vars(served.candidate)})
    else:
        console.result(sentence)


def _already(console: Console, before: RolloutExecution) -> None:
    if before.running:
        console.say(f"Rollout {before.name} is already running.")
    else:
        console.say(f"Rollout {before.name} has already ended; start it again with --again.")


def _report_start(console: Console, context: RolloutContext, what: StartDecision) -> None:
    rollout = what.input
    console.say(
        f"Rollout {what.name} of fleet {context.fleet.name}: {rollout.candidate.name}, {rollout.old} -> {rollout.new}"
    )
    if notice := ProgramHost.of_fleet(context.fleet).notice():
        console.say(f"  {notice}")
    for line in [
        *_steps(rollout.plan, rollout.pace.final),
        *_latencies(what.history),
        *_prospects(rollout.plan, what.history, rollout.pace.period),
    ]:
        console.say(f"  {line}")


def _steps(plan: CanaryPlan, final: int) -> Iterator[str]:
    if shadow := plan.shadow:
        yield (
            f"shadow for {shadow.bake_min} to {shadow.bake_max} minutes: {shadow.percent:g} % of requests are "
            "mirrored, and no traffic moves"
        )
    shares = ", ".join(f"{step.weight} %" for step in plan.steps)
    yield f"{shares} of traffic, each for {plan.bake_min} to {plan.bake_max} minutes; then 100 % for {final} minutes"
    yield (
        f"it goes back if it is worse than the stable version, with a confidence of {1 / plan.alpha:g}:1, or on an "
        f"alarm; a step advances if fewer than {100 * plan.objective:g} % of its requests fail, or hardly more than of "
        f"the stable version, with a confidence of {1 / plan.beta:g}:1"
    )


def _latencies(known: BaselineHistory) -> Iterator[str]:
    if known.latencies:
        limits = ", ".join(
            f"{name} {seconds * 1000:.4g} ms" for name, seconds in zip(LATENCIES, known.latencies, strict=True)
        )
        yield f"latencies are compared at {limits}: those of {known.timed:,} requests to the stable version"
    else:
        yield (
            f"latencies are not compared: the stable version has {known.timed:,} timed requests, and its p99 needs "
            f"{MIN_TIMED_REQUESTS:,}"
        )


def _prospects(plan: CanaryPlan, known: BaselineHistory, minute: int) -> Iterator[str]:
    """The planner's forecast for the current traffic. A minute of the plan may have less than sixty seconds."""
    if not known.rps:
        yield "no forecast: the stable version had no traffic in the last hours"
        return
    # A baseline without errors still has an unknown rate: assume a hundredth of the objective, and print it.
    guess = max(known.error_rate, plan.objective / 100)
    yield f"expected at {known.rps:.3g} requests a second with an error rate of {percent(guess)}:"
    service = Service(known.rps * minute / 60, guess)
    shadow = shadow_prospect(plan, service)
    steps = prospects(plan, service)
    for step in [*([shadow] if shadow else []), *steps]:
        name = f"{step.share} %" if step.share else "shadow"
        ends = f"about {step.advances:.0f} minutes" if step.advances else "rarely decided"
        yield f"  {name}: {ends} for a healthy version{_missed(plan, step)}"
    if any(fault.chance < POWER for fault in steps[0].faults if _judged(plan, fault.fault.name)):
        length = "" if minute == 60 else f" --minute {minute}"
        yield f"what would find them: nxpipe rollout plan --rps {known.rps:.3g} --base-error {guess:.2g}{length}"


def _missed(plan: CanaryPlan, step: StepProspect) -> str:
    """The defects that a step does not find; a shadow phase compares no latencies."""
    names = [
        fault.fault.name
        for fault in step.faults
        if fault.chance < POWER and _judged(plan, fault.fault.name) and (step.share or fault.median_minutes)
    ]
    return f"; does not find {', '.join(names)}" if names else ""


def _judged(plan: CanaryPlan, fault: str) -> bool:
    return bool(plan.latencies) or not fault.startswith("p99")
