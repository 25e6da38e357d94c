"""A verdict in words and numbers, for whoever is asked why."""

import math

from nxpipe.pipeline.canary.counts import ERRORS, METRICS
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.interval import interval
from nxpipe.pipeline.canary.judge import is_timed
from nxpipe.pipeline.canary.plan import Plan
from nxpipe.pipeline.canary.verdict import Decision, Verdict


def explain(plan: Plan, evidence: Evidence, verdict: Verdict) -> str:
    lines = [_sentence(plan, verdict), *_metrics(plan, evidence, verdict)]
    step = evidence.steps[-1]
    if not is_timed(step):
        known = step.requests - step.errors - step.untimed
        lines.append(f"No latency is known of {step.untimed} of {step.untimed + known} requests: so it cannot go on.")
    if verdict.set_aside:
        lines.append(f"Put aside: {'; '.join(verdict.set_aside)}.")
    return "\n".join(lines)


def _sentence(plan: Plan, verdict: Verdict) -> str:
    step = plan.steps[verdict.step]
    where = f"step {verdict.step + 1} of {len(plan.steps)}, {step.weight} % of traffic, minute {verdict.minutes}"
    against = f"evidence against the canary is {odds(verdict.worse)}, and {1 / plan.alpha:g} to 1 sends it back"
    goal = f"an odds ratio below {step.tolerates:g} or an error rate below {plan.objective:.3g}"
    in_favour = f"evidence for {goal} is {odds(verdict.better)}, and {1 / plan.beta:g} to 1 is asked"
    said = {
        Decision.CONTINUE: f"not known yet: {in_favour}; {against}",
        Decision.FROZEN: f"the stable version is itself beyond its objective, so the step stands still: {against}",
        Decision.ADVANCE: f"good enough: {in_favour}; {against}",
        Decision.ROLL_BACK: f"worse than the stable version: {against}",
        Decision.UNDECIDED: f"not known, and the step's time is over: {in_favour}; {against}",
    }
    return f"{verdict.decision.value} ({where}): {said[verdict.decision]}."


def _metrics(plan: Plan, evidence: Evidence, verdict: Verdict) -> list[str]:
    told = []
    for metric, name in enumerate(METRICS):
        low, high = interval(plan, evidence.steps, metric)
        what = "errors" if name == ERRORS else _slower(plan, metric, name)
        told.append(f"  {what}: odds ratio {_between(low, high)}; evidence {odds(verdict.worse_by_metric[metric])}")
    return told


def _slower(plan: Plan, metric: int, name: str) -> str:
    frozen = f", {plan.latencies[metric - 1] * 1000:.4g} ms" if plan.latencies else ""
    return f"slower than {name}{frozen}"


def _between(low: float, high: float) -> str:
    if high == math.inf:
        return f"above {low:g}" if low else "unknown"
    return f"from {low:g} to {high:g}" if low else f"below {high:g}"


def odds(nats: float) -> str:
    """How many to one the bet stands."""
    if nats > math.log(1e6):
        return f"10^{nats / math.log(10):.0f} to 1"
    return f"{math.exp(nats):.3g} to 1"
