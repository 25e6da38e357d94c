"""Words of verdicts, for people: the first line of a record's reason, of a notification and of `nxpipe rollout`.

A sentence has the requests that failed, of both versions, and how sure the judge is. Evidence is shown as a share of
what a decision needs, on a logarithmic scale, because evidence multiplies: half of the share is the square root of the
threshold. Odds are in the further lines of `explain`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

from nxpipe.pipeline.canary.constants import FULL_TRAFFIC_FACTOR, METRIC_STAKES
from nxpipe.pipeline.canary.evalues import FullTrafficTest, interval, worse_by_step
from nxpipe.pipeline.canary.evidence import Evidence, StepEvidence
from nxpipe.pipeline.canary.judge import Decision, Verdict, is_timed
from nxpipe.pipeline.canary.metrics import ERRORS, LATENCIES, METRICS, NO_REQUESTS, Arm, Batch, fault
from nxpipe.pipeline.canary.plan import CanaryPlan


@dataclass(frozen=True)
class PhaseTotals:
    """Sums over the minutes of one phase. In a shadow phase the canary's requests are the compared pairs."""

    canary: Arm = NO_REQUESTS
    stable: Arm = NO_REQUESTS
    paired: tuple[int, int] = (0, 0)  # pairs that are bad for the canary only, and for the stable version only

    def __add__(self, other: "PhaseTotals") -> "PhaseTotals":
        return PhaseTotals(
            _sum(self.canary, other.canary),
            _sum(self.stable, other.stable),
            (self.paired[0] + other.paired[0], self.paired[1] + other.paired[1]),
        )

    @staticmethod
    def of(batch: Batch) -> "PhaseTotals":
        pairs = batch.pairs
        paired = (0, 0) if pairs is None else (int(pairs.canary_alone[0]), int(pairs.stable_alone[0]))
        return PhaseTotals(batch.canary, batch.stable, paired)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "PhaseTotals":
        canary, stable = (
            Arm(**document[arm] | {"slower": tuple(document[arm]["slower"])}) for arm in ("canary", "stable")
        )
        return PhaseTotals(canary, stable, tuple(document["paired"]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _sum(left: Arm, right: Arm) -> Arm:
    """Minutes without latencies add none."""
    slower = (
        tuple(map(sum, zip(left.slower, right.slower, strict=True)))
        if left.slower and right.slower
        else left.slower or right.slower
    )
    return Arm(
        int(left.requests + right.requests),
        int(left.errors + right.errors),
        int(left.timed + right.timed),
        tuple(map(int, slower)),
    )


def totals_after(
    totals: Sequence[PhaseTotals], before: Evidence, after: Evidence, batches: Iterable[Batch]
) -> tuple[PhaseTotals, ...]:
    """The totals of each phase with the minutes that the judge has added to the evidence."""
    sums = [*totals, *[PhaseTotals()] * (len(after.steps) - len(totals))]
    # Of two batches of one minute the judge takes the first in this order.
    added = {batch.minute: batch for batch in sorted(batches, key=repr, reverse=True) if fault(batch) is None}
    for minute, batch in added.items():
        if minute in after.taken and minute not in before.taken:
            phase = max(at for at, step in enumerate(after.steps) if step.begun <= minute)
            sums[phase] += PhaseTotals.of(batch)
    return tuple(sums)


# Evidence


def share(nats: float, error: float) -> float:
    """Evidence as a share of what a decision with this error rate needs, from 0 to 1."""
    return min(1.0, max(0.0, nats / math.log(1 / error)))


def percent(part: float) -> str:
    """A share of evidence; a threshold that is not reached never reads as 100 %."""
    return "100 %" if part >= 1 else f"{min(99, round(100 * part))} %"


def confidence(nats: float) -> str:
    """An e-value as odds with two digits, such as 4,800:1."""
    if nats > math.log(1e6):
        return "more than 1,000,000:1"
    odds = math.exp(nats)
    if odds >= 100:
        return f"{round(odds, 1 - math.floor(math.log10(odds))):,.0f}:1"
    return f"{odds:.2g}:1"


def odds(nats: float) -> str:
    """An e-value as odds, for tables of evaluations."""
    if nats > math.log(1e6):
        return f"10^{nats / math.log(10):.0f} to 1"
    return f"{math.exp(nats):.3g} to 1"


# Sentences


def verdict_sentence(plan: CanaryPlan, evidence: Evidence, totals: Sequence[PhaseTotals], verdict: Verdict) -> str:
    """The verdict in one sentence: what is decided, where, after how long, and the counts."""
    place = f"{place_of(plan, verdict.step)} after {verdict.minutes:,} min"
    if verdict.decision is Decision.ROLL_BACK:
        cause = leading_metric(verdict)
        begun = _leading_phase(plan, evidence, cause)
        counts = _counts_since(plan, evidence, totals, cause, begun)
        began = "Refused" if plan.is_shadow(verdict.step) else "Rolled back"
        return f"{began} {place}: {counts}; confidence {_against(plan, verdict.worse)}."
    counts = _counts_since(plan, evidence, totals, 0, verdict.step)
    if verdict.decision is Decision.ADVANCE:
        return f"Advanced {_from(place)}: {counts}; confidence {_in_favour(plan, verdict.better)}."
    if verdict.decision is Decision.FROZEN:
        return f"On hold {place}: the stable version itself fails more than {_rate(plan.objective)} of its requests."
    began = "Undecided" if verdict.decision is Decision.UNDECIDED else "Not decided yet"
    untimed = "" if is_timed(evidence.steps[-1]) else f"; {_untimed(evidence.steps[-1])}"
    return f"{began} {place}: {counts}{untimed}; {evidence_shares(plan, verdict)}."


def evidence_shares(plan: CanaryPlan, verdict: Verdict) -> str:
    """Both shares of evidence in one clause."""
    advance, regression = share(verdict.better, plan.beta), share(verdict.worse, plan.alpha)
    against = percent(regression) if round(100 * regression) else "none"
    return f"evidence to advance: {percent(advance)} of what is needed; of a regression: {against}"


def counts_sentence(
    plan: CanaryPlan, evidence: Evidence, totals: Sequence[PhaseTotals], phase: int, *, whole: bool = False
) -> str:
    """The failed requests of both versions in a phase, or since the first step."""
    return _counts_since(plan, evidence, totals, 0, 0 if whole else phase)


def full_traffic_sentence(plan: CanaryPlan, alone: FullTrafficTest, minutes: int, final: int) -> str:
    """The state at full traffic, where nothing is left to compare with."""
    counts = f"{alone.errors:,} of {alone.requests:,} requests failed"
    limit = _rate(plan.objective)
    if alone.fails(plan):
        sure = f"{confidence(alone.against(plan.objective))}, threshold {FULL_TRAFFIC_FACTOR / plan.alpha:,.0f}:1"
        return (
            f"Rolled back at full traffic after {minutes:,} min: {counts}, more than the limit of {limit}; "
            f"confidence {sure}."
        )
    if minutes >= final:
        return f"Promoted after {minutes:,} min of full traffic: {counts}, limit {limit}."
    return f"Full traffic for {max(0, minutes):,} of {final:,} min: {counts}, limit {limit}."


def place_of(plan: CanaryPlan, phase: int) -> str:
    return "in the shadow phase" if plan.is_shadow(phase) else f"at {plan.phases[phase].weight} %"


def phase_title(plan: CanaryPlan, phase: int) -> str:
    """The name of a phase, such as "step 1 of 4, 5 % of traffic"; the shadow phase is no step."""
    if plan.shadow is not None and phase == 0:
        return f"shadow, {plan.shadow.percent:g} % of requests mirrored"
    number = phase + 1 - (plan.shadow is not None)
    return f"step {number} of {len(plan.steps)}, {plan.phases[phase].weight} % of traffic"


def leading_metric(verdict: Verdict) -> int:
    """The metric whose bets hold most of the capital against the canary."""
    capitals = [math.log(stake) + nats for stake, nats in zip(METRIC_STAKES, verdict.worse_by_metric, strict=True)]
    return capitals.index(max(capitals))


def _leading_phase(plan: CanaryPlan, evidence: Evidence, metric: int) -> int:
    """The phase since whose start the largest of the metric's bets runs."""
    parts = worse_by_step(plan, evidence.steps, metric, plan.margin)
    return parts.index(max(parts))


def _counts_since(plan: CanaryPlan, evidence: Evidence, totals: Sequence[PhaseTotals], metric: int, first: int) -> str:
    if not _complete(evidence, totals):
        canary = evidence.steps[-1]
        return f"{canary.errors:,} of {canary.requests:,} requests of the new version failed"
    shadow = totals[0] if plan.shadow is not None and first == 0 else None
    steps = [phase for at, phase in enumerate(totals) if at >= first and not plan.is_shadow(at)]
    parts = []
    if shadow is not None and (not steps or (shadow.canary.requests and not metric)):
        parts.append(_pairs(shadow))
    if steps:
        span = reduce(PhaseTotals.__add__, steps)
        parts.append(_slower(plan, span, metric) if metric else _failed(span))
    since = " since the first step" if len(steps) > 1 else ""
    return f"{'; '.join(parts)}{since}"


def _complete(evidence: Evidence, totals: Sequence[PhaseTotals]) -> bool:
    """False if the judge was updated during the rollout: an earlier version did not keep the totals."""
    counted = [int(phase.canary.requests) for phase in totals]
    return counted == [step.requests for step in evidence.steps]


def _failed(span: PhaseTotals) -> str:
    new, old = span.canary, span.stable
    return (
        f"{new.errors:,} of {new.requests:,} requests failed against {old.errors:,} of {old.requests:,} of the stable "
        "version"
    )


def _pairs(shadow: PhaseTotals) -> str:
    if not shadow.canary.requests:
        return "no mirrored request was compared"
    return (
        f"{shadow.canary.errors:,} of {shadow.canary.requests:,} mirrored requests failed or differed, the stable "
        f"version failed alone in {shadow.paired[1]:,}"
    )


def _slower(plan: CanaryPlan, span: PhaseTotals, metric: int) -> str:
    """How much slower, and the counts beyond the threshold."""
    new, old, at = span.canary, span.stable, metric - 1
    quantile = LATENCIES[at].partition(" ")[0]
    factor = _slowdown(plan, span, quantile)
    limit = milliseconds(plan.latencies[at]) if plan.latencies else f"{LATENCIES[at]} of the history"
    beyond, others = (arm.slower[at] if arm.slower else 0 for arm in (new, old))
    counts = (
        f"{beyond:,} of {new.timed:,} requests took longer than {limit} against {others:,} of {old.timed:,} of the "
        "stable version"
    )
    return f"{quantile} {factor} slower: {counts}" if factor else f"slower: {counts}"


def _slowdown(plan: CanaryPlan, span: PhaseTotals, quantile: str) -> str | None:
    """The factor between the versions' latencies at a quantile; None if it is not above 1 or cannot be read."""
    new, old = latency(plan, span.canary, quantile), latency(plan, span.stable, quantile)
    if old is None:
        return None
    if new is None:  # beyond the largest threshold
        least = plan.latencies[-1] / old
        return f"more than {least:.1f}x" if least > 1 else None
    return f"{new / old:.1f}x" if new / old >= 1.05 else None


def latency(plan: CanaryPlan, arm: Arm, quantile: str) -> float | None:
    """The latency of a version at a quantile such as "p99", in seconds, interpolated between the thresholds.

    None if it lies beyond the largest threshold or below the smallest one, or nothing was timed.
    """
    if not arm.timed or not arm.slower or not plan.latencies:
        return None
    beyond = 1 - int(quantile[1:]) / 100
    known = [(seconds, count / arm.timed) for seconds, count in zip(plan.latencies, arm.slower, strict=True)]
    for (low, above), (high, below) in pairwise(known):
        if above >= beyond >= below:
            return high if above == below else low + (high - low) * (above - beyond) / (above - below)
    # The smallest threshold is the median of the history: a median just below it is about there.
    return known[0][0] if quantile == LATENCIES[0] and 0.4 < known[0][1] < beyond else None


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _against(plan: CanaryPlan, nats: float) -> str:
    return f"{confidence(nats)}, threshold {1 / plan.alpha:,.0f}:1"


def _untimed(step: StepEvidence) -> str:
    good = step.requests - step.errors
    return f"{step.untimed:,} of {good:,} good responses have no latency, so the step cannot advance"


def _in_favour(plan: CanaryPlan, nats: float) -> str:
    return f"{confidence(nats)}, threshold {1 / plan.beta:,.0f}:1"


def _from(place: str) -> str:
    return place.replace("at ", "from ", 1).replace("in the", "from the", 1)


def _rate(rate: float) -> str:
    return f"{100 * rate:.3g} %"


# Figures


def explain(plan: CanaryPlan, evidence: Evidence, totals: Sequence[PhaseTotals], verdict: Verdict) -> str:
    """The sentence of the verdict, and the figures behind it: odds, and the confidence sequence of each metric."""
    lines = [verdict_sentence(plan, evidence, totals, verdict), *_odds(plan, verdict)]
    lines += _metrics(plan, evidence, verdict)
    step = evidence.steps[-1]
    if plan.is_shadow(verdict.step) and not step.requests:
        lines.append("No pair was recorded: the stable instances mirror no requests, or their agents publish no pairs.")
    if verdict.set_aside:
        lines.append(f"Invalid minutes: {'; '.join(verdict.set_aside)}.")
    return "\n".join(lines)


def _odds(plan: CanaryPlan, verdict: Verdict) -> list[str]:
    tolerated = plan.phases[verdict.step].tolerates
    return [
        f"  {phase_title(plan, verdict.step)}, minute {verdict.minutes}: {verdict.decision.value}",
        f"  to advance: {odds(verdict.better)} for an odds ratio below {tolerated:g} or an error rate below "
        f"{_rate(plan.objective)}; {1 / plan.beta:g} to 1 is needed",
        f"  regression: {odds(verdict.worse)}; {1 / plan.alpha:g} to 1 rolls back",
    ]


def _metrics(plan: CanaryPlan, evidence: Evidence, verdict: Verdict) -> list[str]:
    lines = []
    for metric, name in enumerate(METRICS):
        low, high = interval(plan, evidence.steps, metric)
        if name != ERRORS and not plan.latencies and (low, high) == (0.0, math.inf):
            continue  # latency is not judged
        limit = f", {milliseconds(plan.latencies[metric - 1])}" if name != ERRORS and plan.latencies else ""
        label = "errors" if name == ERRORS else f"slower than {name}{limit}"
        lines.append(f"    {label}: odds ratio {_between(low, high)}; {odds(verdict.worse_by_metric[metric])}")
    return lines


def _between(low: float, high: float) -> str:
    if high == math.inf:
        return f"above {low:g}" if low else "unknown"
    return f"from {low:g} to {high:g}" if low else f"below {high:g}"
