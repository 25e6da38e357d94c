"""Judge of a rollout: a pure function of plan, evidence, new minutes and the moment, without clock, network or
randomness.

Each minute counts once, for the step in which it lies, whenever it arrives. So CloudWatch may be late, an evaluation
may be repeated, and a replay of the record gives the same verdict.

Texts of minutes that were set aside are part of verdicts, which a replay compares: changing one makes replays of
earlier records fail. `explanation.py` words verdicts for people.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from nxpipe.pipeline.canary.constants import INCIDENT, MAX_UNTIMED, SUSPICION
from nxpipe.pipeline.canary.documents import EvidenceInvalid
from nxpipe.pipeline.canary.evalues import all_metrics, better, within_objective, worse
from nxpipe.pipeline.canary.evidence import Evidence, StepEvidence, empty_step, evidence_of_minute
from nxpipe.pipeline.canary.likelihood import log_sum
from nxpipe.pipeline.canary.metrics import METRICS, Arm, Batch, Minutes, fault
from nxpipe.pipeline.canary.plan import CanaryPlan


class Decision(StrEnum):
    CONTINUE = "continue"
    FROZEN = "frozen"
    ADVANCE = "advance"
    ROLL_BACK = "roll_back"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """The outcome of an evaluation. Evidence is in nats: the natural logarithm of an e-value."""

    decision: Decision
    step: int
    minutes: int  # duration of the step without frozen minutes
    worse: float  # against the canary, all metrics together
    worse_by_metric: tuple[float, ...]
    better: float  # in favour of the canary: within the step's tolerance, or within the objective
    set_aside: tuple[str, ...] = ()  # minutes of this evaluation that were invalid, with the reason

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Verdict":
        fields = dict(document)
        return Verdict(
            decision=Decision(fields.pop("decision")),
            worse_by_metric=tuple(fields.pop("worse_by_metric")),
            set_aside=tuple(fields.pop("set_aside")),
            **fields,
        )


@dataclass(frozen=True)
class Moment:
    """The position of the rollout. Minutes are numbered as in batches; those before `minute` are over."""

    step: int
    begun: int  # first minute with the step's weights verified
    minute: int
    extended: int = 0  # minutes by which a person has extended the step


@dataclass(frozen=True)
class Judgement:
    """A verdict, and the evidence that it is based on."""

    evidence: Evidence
    verdict: Verdict


def judge(plan: CanaryPlan, evidence: Evidence, batches: Sequence[Batch], at: Moment) -> Judgement:
    """Add the minutes to the evidence, and decide."""
    evidence, refused = add_minutes(plan, evidence, batches, at)
    return Judgement(evidence, decide(plan, evidence, at, refused))


def add_minutes(
    plan: CanaryPlan, evidence: Evidence, batches: Sequence[Batch], at: Moment
) -> tuple[Evidence, tuple[str, ...]]:
    """The evidence with each valid minute added to its step, and the reasons why others were set aside."""
    steps, refused = list(_begun(plan, evidence, at).steps), []
    accepted: dict[int, Batch] = {}
    for batch in sorted(batches, key=repr):
        reason = fault(batch) or _out_of_place(batch.minute, evidence, accepted, steps[0].begun, at)
        if reason:
            refused.append(f"minute {batch.minute}: {reason}")
        else:
            accepted[batch.minute] = batch
    for batch in accepted.values():
        number = max(at for at, step in enumerate(steps) if step.begun <= batch.minute)
        steps[number] = _with(plan, steps[number], batch)
    frozen = {minute for minute, batch in accepted.items() if is_incident(plan, batch.stable)}
    baked = {minute for minute, batch in accepted.items() if batch.canary.requests or batch.pairs} - frozen
    updated = Evidence(
        tuple(steps),
        evidence.taken.joined(Minutes.of(accepted)),
        evidence.frozen.joined(Minutes.of(frozen)),
        evidence.baked.joined(Minutes.of(baked)),
        evidence.set_aside + len(refused),
    )
    return updated, tuple(refused)


def decide(plan: CanaryPlan, evidence: Evidence, at: Moment, refused: tuple[str, ...] = ()) -> Verdict:
    """The verdict on the evidence at this moment."""
    steps = evidence.steps
    against = tuple(worse(plan, steps, metric, plan.margin) for metric in range(len(METRICS)))
    minutes = max(0, at.minute - at.begun - evidence.frozen.since(at.begun))
    verdict = Verdict(
        Decision.CONTINUE, at.step, minutes, all_metrics(against), against, _good_enough(plan, steps[-1], at), refused
    )
    return replace(verdict, decision=_decision(plan, evidence, verdict, at))


def _decision(plan: CanaryPlan, evidence: Evidence, verdict: Verdict, at: Moment) -> Decision:
    # Ville's inequality: the e-process of a canary that is no worse ever reaches 1/alpha in at most alpha of all
    # rollouts (Type I error). So the first crossing rolls back, at any minute and step, before all other rules.
    threshold, (shortest, longest) = math.log(1 / plan.alpha), plan.bake(at.step)
    if verdict.worse >= threshold:
        return Decision.ROLL_BACK
    # During an incident of the baseline the comparison continues, but no version gets more traffic.
    if evidence.taken.newest is not None and evidence.taken.newest in evidence.frozen:
        is_exhausted = evidence.frozen.since(at.begun) >= longest + at.extended
        return Decision.UNDECIDED if is_exhausted else Decision.FROZEN
    suspected = verdict.worse >= threshold * SUSPICION
    baked = evidence.baked.since(at.begun) >= shortest and is_timed(evidence.steps[-1])
    if verdict.better >= math.log(1 / plan.beta) and baked and not suspected:
        return Decision.ADVANCE
    return Decision.UNDECIDED if verdict.minutes >= longest + at.extended else Decision.CONTINUE


def _good_enough(plan: CanaryPlan, step: StepEvidence, at: Moment) -> float:
    """The e-value against the null "beyond the step's tolerance, and beyond the objective": the mean of both tests.

    Either one suffices to advance: a service with few errors is within its objective long before a ratio is known. Both
    tests are valid under the joint null, and so is their mean.
    """
    half = math.log(0.5)
    ratio = better(plan, [step], 0, plan.phases[at.step].tolerates)
    return log_sum((half + ratio, half + within_objective(plan, step)))


def is_timed(step: StepEvidence) -> bool:
    """False if too many requests have no latency: the slow requests may be the missing ones."""
    return step.untimed <= MAX_UNTIMED * step.requests


def is_incident(plan: CanaryPlan, stable: Arm) -> bool:
    """True if the baseline itself was beyond the objective in this minute, by Chernoff's bound."""
    n, k, rate = stable.requests, stable.errors, plan.objective
    if k <= n * rate:
        return False
    good = (n - k) * math.log((1 - k / n) / (1 - rate)) if k < n else 0.0
    return k * math.log(k / n / rate) + good >= INCIDENT


def _begun(plan: CanaryPlan, evidence: Evidence, at: Moment) -> Evidence:
    """The evidence, with the step of this moment added if it is new."""
    steps = evidence.steps
    if not 0 <= at.step < len(plan.phases) or not len(steps) - 1 <= at.step <= len(steps):
        raise EvidenceInvalid(
            f"step {at.step} does not follow the evidence of {len(steps)} of {len(plan.phases)} steps; "
            "begin the steps in order"
        )
    if at.step < len(steps):
        return evidence
    if steps and at.begun <= steps[-1].begun:
        raise EvidenceInvalid(
            f"step {at.step} begins at minute {at.begun}, before the previous step; pass a later minute"
        )
    return replace(evidence, steps=(*steps, empty_step(plan, at.begun)))


def _out_of_place(minute: int, evidence: Evidence, accepted: dict[int, Batch], first: int, at: Moment) -> str | None:
    """The reason why a minute does not count now; None if it does."""
    if minute in evidence.taken or minute in accepted:
        return "it was taken in before"
    if minute < first:
        return "the rollout had not begun"
    return "it is not over yet" if minute >= at.minute else None


def _with(plan: CanaryPlan, step: StepEvidence, batch: Batch) -> StepEvidence:
    arm = batch.canary
    untimed = int(arm.requests - arm.errors - arm.timed) if arm.slower else 0
    return step + StepEvidence(step.begun, evidence_of_minute(plan, batch), int(arm.requests), int(arm.errors), untimed)
