"""A rollout is begun, and said to be: what it will do, what it goes by, and what it cannot find out."""

from collections.abc import Iterator
from dataclasses import dataclass

from nxpipe.pipeline.canary.counts import LATENCIES
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.ending import settle
from nxpipe.pipeline.rollout.history import FEWEST, History
from nxpipe.pipeline.rollout.machine import Execution
from nxpipe.pipeline.rollout.opened import Opened
from nxpipe.pipeline.rollout.planner import POWER, Service, prospects
from nxpipe.pipeline.rollout.start import Begin, ServedAlready, Wanted, begin, decide
from nxpipe.pipeline.util.console import Console


@dataclass(frozen=True)
class Begun:
    """By this call, or by the same words before."""

    arn: str
    is_over: bool


def begin_wanted(console: Console, one: Opened, wanted: Wanted) -> Begun | ServedAlready:
    """What the last one may have left to do is done first."""
    settle(one, one.watcher.status())
    decided = decide(one.machine, one.artifacts, wanted, one.config.rollout)
    if isinstance(decided, ServedAlready):
        return decided
    if isinstance(decided, Execution):
        _already(console, decided)
        return Begun(decided.arn, is_over=not decided.running)
    _tell(console, one, decided)
    return Begun(begin(one.machine, one.artifacts, decided), is_over=False)


def served_already(console: Console, one: Opened, found: ServedAlready) -> None:
    sentence = f"Fleet {one.fleet.name} runs {found.candidate.name} already, on {found.colour}."
    if console.json:
        console.data({"fleet": one.fleet.name, "phase": "none", "artifact": vars(found.candidate)})
    else:
        console.result(sentence)


def _already(console: Console, before: Execution) -> None:
    if before.running:
        console.say(f"Rollout {before.name} of it is under way already.")
    else:
        console.say(f"Rollout {before.name} of it has been; start it once more with --again.")


def _tell(console: Console, one: Opened, what: Begin) -> None:
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


def _latencies(known: History) -> Iterator[str]:
    if known.latencies:
        frozen = ", ".join(
            f"{name} {seconds * 1000:.4g} ms" for name, seconds in zip(LATENCIES, known.latencies, strict=True)
        )
        yield f"slower counts from: {frozen}; frozen from {known.timed} requests"
    else:
        yield (
            f"latency is not judged: {known.timed} requests of the old version were timed, and {FEWEST} are needed to "
            "know its p99"
        )


def _prospects(plan: CanaryPlan, known: History, minute: int) -> Iterator[str]:
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
