"""The judge: takes minutes in, says what is to be done. Pure: no clock, no chance, no network."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.pipeline.canary.counts import METRICS, Arm, Batch, fault
from nxpipe.pipeline.canary.curve import curves_of
from nxpipe.pipeline.canary.errors import EvidenceInvalid
from nxpipe.pipeline.canary.evidence import Evidence, StepEvidence, begin
from nxpipe.pipeline.canary.logs import log_sum
from nxpipe.pipeline.canary.minutes import Minutes
from nxpipe.pipeline.canary.plan import Plan
from nxpipe.pipeline.canary.values import all_metrics, better, within_objective, worse
from nxpipe.pipeline.canary.verdict import Decision, Verdict

_UNTIMED: Final = 0.2  # of the canary's requests: with more that nobody has timed, latencies prove little
_INCIDENT: Final = math.log(100)  # a minute freezes that a stable version at its objective has in one of 100


@dataclass(frozen=True)
class Moment:
    """Where the rollout stands. Minutes are numbered as the batches are; those before `minute` are over."""

    step: int
    begun: int  # when the step's share was verified to be in force
    minute: int
    extended: int = 0  # by how many minutes a person has put off the end of the step


@dataclass(frozen=True)
class Judged:
    evidence: Evidence
    verdict: Verdict


def judge(plan: Plan, evidence: Evidence, batches: Sequence[Batch], at: Moment) -> Judged:
    evidence, refused = take_in(plan, evidence, batches, at)
    return Judged(evidence, verdict_of(plan, evidence, at, refused))


def take_in(plan: Plan, evidence: Evidence, batches: Sequence[Batch], at: Moment) -> tuple[Evidence, tuple[str, ...]]:
    """Each minute once, whenever it comes, in the step that it belongs to; and why others were put aside."""
    steps, refused = list(_begun(plan, evidence, at).steps), []
    taken: dict[int, Batch] = {}
    for batch in sorted(batches, key=repr):
        said = fault(batch) or _out_of_place(batch.minute, evidence, taken, steps[0].begun, at)
        if said:
            refused.append(f"minute {batch.minute}: {said}")
        else:
            taken[batch.minute] = batch
    for batch in taken.values():
        number = max(at for at, step in enumerate(steps) if step.begun <= batch.minute)
        steps[number] = _with(plan, steps[number], batch)
    frozen = {minute for minute, batch in taken.items() if in_trouble(plan, batch.stable)}
    baked = {minute for minute, batch in taken.items() if batch.canary.requests or batch.pairs} - frozen
    grown = Evidence(
        tuple(steps),
        evidence.taken.joined(Minutes.of(taken)),
        evidence.frozen.joined(Minutes.of(frozen)),
        evidence.baked.joined(Minutes.of(baked)),
        evidence.set_aside + len(refused),
    )
    return grown, tuple(refused)


def verdict_of(plan: Plan, evidence: Evidence, at: Moment, refused: tuple[str, ...] = ()) -> Verdict:
    steps = evidence.steps
    against = tuple(worse(plan, steps, metric, plan.margin) for metric in range(len(METRICS)))
    minutes = max(0, at.minute - at.begun - evidence.frozen.since(at.begun))
    verdict = Verdict(
        Decision.CONTINUE, at.step, minutes, all_metrics(against), against, _good_enough(plan, steps[-1], at), refused
    )
    return replace(verdict, decision=_decision(plan, evidence, verdict, at))


def _decision(plan: Plan, evidence: Evidence, verdict: Verdict, at: Moment) -> Decision:
    enough = math.log(1 / plan.alpha)
    if verdict.worse >= enough:
        return Decision.ROLL_BACK
    if evidence.taken.newest is not None and evidence.taken.newest in evidence.frozen:
        lasting = evidence.frozen.since(at.begun) >= plan.bake_max + at.extended
        return Decision.UNDECIDED if lasting else Decision.FROZEN
    suspected = verdict.worse >= enough / 2  # half the way, in nats: not now
    baked = evidence.baked.since(at.begun) >= plan.bake_min and is_timed(evidence.steps[-1])
    if verdict.better >= math.log(1 / plan.beta) and baked and not suspected:
        return Decision.ADVANCE
    return Decision.UNDECIDED if verdict.minutes >= plan.bake_max + at.extended else Decision.CONTINUE


def _good_enough(plan: Plan, step: StepEvidence, at: Moment) -> float:
    """Against "at least what the step does not tolerate, and beyond the objective too": a mean of both bets."""
    half = math.log(0.5)
    ratio = better(plan, [step], 0, plan.steps[at.step].tolerates)
    return log_sum((half + ratio, half + within_objective(plan, step)))


def is_timed(step: StepEvidence) -> bool:
    """Latencies speak for the requests that have one, and for no others."""
    return step.untimed <= _UNTIMED * step.requests


def in_trouble(plan: Plan, stable: Arm) -> bool:
    """Whether the stable version was itself beyond its objective, by Chernoff's bound."""
    n, k, rate = stable.requests, stable.errors, plan.objective
    if k <= n * rate:
        return False
    good = (n - k) * math.log((1 - k / n) / (1 - rate)) if k < n else 0.0
    return k * math.log(k / n / rate) + good >= _INCIDENT


def _begun(plan: Plan, evidence: Evidence, at: Moment) -> Evidence:
    """With the step of this moment begun, if it was not."""
    steps = evidence.steps
    if not 0 <= at.step < len(plan.steps) or not len(steps) - 1 <= at.step <= len(steps):
        raise EvidenceInvalid(
            f"Step {at.step} cannot be judged on the evidence of {len(steps)} steps of {len(plan.steps)}; "
            "a rollout begins its steps one after another."
        )
    if at.step < len(steps):
        return evidence
    if steps and at.begun <= steps[-1].begun:
        raise EvidenceInvalid(f"Step {at.step} begins at minute {at.begun}, before the one that it follows.")
    return replace(evidence, steps=(*steps, begin(plan, at.begun)))


def _out_of_place(minute: int, evidence: Evidence, taken: dict[int, Batch], first: int, at: Moment) -> str | None:
    if minute in evidence.taken or minute in taken:
        return "it was taken in before"
    if minute < first:
        return "the rollout had not begun"
    return "it is not over yet" if minute >= at.minute else None


def _with(plan: Plan, step: StepEvidence, batch: Batch) -> StepEvidence:
    arm = batch.canary
    untimed = int(arm.requests - arm.errors - arm.timed) if arm.slower else 0
    return step + StepEvidence(step.begun, curves_of(plan, batch), int(arm.requests), int(arm.errors), untimed)
