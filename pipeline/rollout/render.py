"""Text of rollouts: the status page, a status line for logs, the table of evaluations, the histogram of simulations."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.canary.judge import Decision, Verdict, odds
from nxpipe.pipeline.canary.metrics import ERRORS, METRICS
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.aws import RolloutExecution
from nxpipe.pipeline.rollout.status import EvaluationRecord, Phase, RolloutEnd, Status
from nxpipe.pipeline.util.text import style, table

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.simulate import SimulatedRollout

_BAR: Final = 24  # characters
_COLOURS: Final = {"blue": "blue", "green": "green"}
_ENDS: Final = {
    RolloutEnd.PROMOTED: ("promoted", "green"),
    RolloutEnd.ROLLED_BACK: ("rolled back", "red"),
    RolloutEnd.CAPACITY_BLOCKED: ("capacity blocked: the candidate never had traffic", "yellow"),
    RolloutEnd.REFUSED: ("refused: nothing was changed", "red"),
    RolloutEnd.UNFINISHED: ("failed; the watchdog is rolling back", "yellow"),
}


def status_page(status: Status) -> str:
    """The whole status at one moment."""
    rows = [("traffic", _traffic(status))]
    if position := _where(status):
        rows.append(("position", position))
    plan, verdict = status.plan, status.verdict
    if plan and verdict:
        rows += _evidence(status, plan, verdict)
    if status.evaluation and status.phase is not Phase.ENDED and (news := _news(status.evaluation)):
        rows.append(("last evaluation", news))
    if status.signal:
        rows.append(("signal", f"{status.signal}; it takes effect at the next evaluation"))
    if status.outcome:
        rows.append(("reason", status.outcome.reason))
    width = max(len(name) for name, _ in rows)
    further = "\n" + " " * (width + 4)
    return "\n".join([_title(status), *(f"  {name:{width}}  {text.replace(chr(10), further)}" for name, text in rows)])


def status_line(status: Status) -> str:
    """One line for a log."""
    parts = [_plain_weights(status), _where(status) or "no rollout yet"]
    if verdict := status.verdict:
        parts.append(f"for {odds(verdict.better)}, against {odds(verdict.worse)}")
    if status.outcome:
        parts.append(status.outcome.reason.split("\n")[0])
    return "; ".join(parts)


def _news(evaluation: EvaluationRecord) -> str | None:
    """The summary of an evaluation, unless it is `continue`."""
    summary = evaluation.reason.split("\n")[0]
    return None if summary.startswith(Decision.CONTINUE) else summary


def _title(status: Status) -> str:
    execution = status.execution
    if execution is None:
        return style(f"Fleet {status.fleet}", bold=True)
    rollout = execution.input
    way = f": {rollout.candidate.name}, {rollout.old} -> {rollout.new}" if rollout else ""
    return f"{style(f'Fleet {status.fleet}{way}', bold=True)}  {style(execution.name, dim=True)}"


def _where(status: Status) -> str | None:
    if status.outcome:
        words, colour = _ENDS[status.outcome.end]
        return style(words, fg=colour, bold=True)
    if status.phase is Phase.STARTING:
        return "starting, or left by a command that was killed; start it again"
    if status.phase is Phase.FILLING:
        return "instances of the candidate are starting"
    if status.phase is Phase.FINAL:
        return "full traffic; instances of the baseline still run"
    return _step(status, status.plan) if status.phase in (Phase.SHADOW, Phase.STEP) and status.plan else None


def _step(status: Status, plan: CanaryPlan) -> str:
    where, verdict = _phase_name(plan, status.step), status.verdict
    if verdict is None:
        return f"{where}, starting"
    if status.evaluation and status.evaluation.action == "roll_back":
        return f"{where}: {style('rolling back', fg='red', bold=True)}"
    if status.undecided:
        return f"{where}: {style('undecided: a person must decide', fg='yellow', bold=True)}"
    shortest, longest = plan.bake(status.step)
    minutes = f"{where}, minute {verdict.minutes} of {shortest} to {longest}"
    left = status.minutes_left
    return minutes if left is None else f"{minutes}, about {left} left"


def _phase_name(plan: CanaryPlan, phase: int) -> str:
    if plan.shadow is not None and plan.is_shadow(phase):
        return f"shadow, {plan.shadow.percent:g} % of requests mirrored"
    return f"step {_number(plan, phase)} of {len(plan.steps)}, at {plan.phases[phase].weight} %"


def _number(plan: CanaryPlan | None, phase: int) -> str:
    """The number of a step as people count them: a shadow phase is before the first."""
    if plan is None or plan.shadow is None:
        return str(phase + 1)
    return str(phase) if phase else "shadow"


def _traffic(status: Status) -> str:
    """Current weights of the load balancer, as a bar and in percent."""
    whole = sum(status.weights.values()) or 1
    shares = {colour: weight for colour, weight in status.weights.items() if weight}
    filled = "".join(_bar_of(colour, weight * _BAR / whole) for colour, weight in shares.items())
    return f"[{filled}]  {_plain_weights(status)}"


def _plain_weights(status: Status) -> str:
    whole = sum(status.weights.values()) or 1
    return ", ".join(f"{colour} {100 * weight / whole:g} %" for colour, weight in status.weights.items() if weight)


def _bar_of(colour: str, length: float) -> str:
    return style({"blue": "=", "green": "#"}.get(colour, "-") * max(1, round(length)), fg=_COLOURS.get(colour))


def _evidence(status: Status, plan: CanaryPlan, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Bars are in nats, because evidence multiplies: half a bar is the square root of the threshold."""
    better, worse = odds(verdict.better), odds(verdict.worse)
    yield "for", f"{_bar(verdict.better, plan.beta, 'green')}  {better}; next step at {1 / plan.beta:g} to 1"
    yield "against", f"{_bar(verdict.worse, plan.alpha, 'red')}  {worse}; rollback at {1 / plan.alpha:g} to 1"
    for metric, name in enumerate(METRICS):
        if name != ERRORS and not plan.latencies:
            continue
        grown = verdict.worse_by_metric[metric]
        slower = f", {plan.latencies[metric - 1] * 1000:.3g} ms" if name != ERRORS else ""
        yield f"  {name}{slower}", _bar(grown, plan.alpha, "red") + f"  {odds(grown)}{_ratio(status, metric)}"


def _ratio(status: Status, metric: int) -> str:
    interval = status.ratio(metric)
    if interval is None or interval == (0.0, math.inf):
        return ""
    low, high = interval
    if high == math.inf:
        return f"; ratio above {low:g}"
    return f"; ratio {low:g} to {high:g}" if low else f"; ratio below {high:g}"


def _bar(nats: float, error: float, colour: str) -> str:
    filled = round(_BAR * min(1.0, max(0.0, nats / math.log(1 / error))))
    return f"[{style('#' * filled, fg=colour)}{'.' * (_BAR - filled)}]"


_HEADER: Final = ("at", "step", "candidate: bad of all", "baseline: bad of all", "for", "against", "action", "reason")


def evaluation_table(execution: RolloutExecution, evaluations: Sequence[EvaluationRecord]) -> str:
    """Counts are those of the minutes that an evaluation read; evidence is cumulative."""
    rollout = execution.input
    title = f"{execution.name}: {rollout.candidate.name}, {rollout.old} -> {rollout.new}" if rollout else execution.name
    if not evaluations:
        return f"{title}\nNo evaluation yet."
    plan = rollout.plan if rollout else None
    return f"{title}\n{table(_HEADER, [_row(plan, evaluation) for evaluation in evaluations])}"


def _row(plan: CanaryPlan | None, evaluation: EvaluationRecord) -> tuple[str, ...]:
    arms = [(batch.canary, batch.stable) for batch in evaluation.batches]
    new, old = ([pair[side] for pair in arms] for side in (0, 1))
    counts = [f"{sum(arm.errors for arm in side):g} of {sum(arm.requests for arm in side):g}" for side in (new, old)]
    verdict = evaluation.verdict
    evidence = (odds(verdict.better), odds(verdict.worse)) if verdict else ("", "")
    at = evaluation.at.replace("T", " ")[:19]
    step = "all" if evaluation.step is None else _number(plan, evaluation.step)
    return (at, step, *(counts if arms else ("", "")), *evidence, evaluation.action, evaluation.reason.split("\n")[0])


_BARS: Final = 12
_WIDTH: Final = 60


@dataclass(frozen=True)
class BarStyle:
    name: str
    mark: str  # distinguishable without colour
    colour: str


BAR_STYLES: Final = {
    Decision.ADVANCE: BarStyle("promoted", "█", "green"),
    Decision.ROLL_BACK: BarStyle("rolled back", "▒", "red"),
    Decision.UNDECIDED: BarStyle("undecided", "░", "yellow"),
}


def duration_histogram(outcomes: "Sequence[SimulatedRollout]") -> str:
    """One bar per span of minutes; its marks are rollouts, by their end."""
    longest = max(outcome.minutes for outcome in outcomes)
    span = -(-(longest + 1) // _BARS)
    ended = Counter((outcome.minutes // span, outcome.decision) for outcome in outcomes)
    bars = [{decision: ended[bar, decision] for decision in BAR_STYLES} for bar in range(longest // span + 1)]
    highest = max(sum(bar.values()) for bar in bars)
    return "\n".join(_line(at * span, span, bar, highest) for at, bar in enumerate(bars))


def _line(first: int, span: int, bar: dict[Decision, int], highest: int) -> str:
    minutes = f"{first}" if span == 1 else f"{first}-{first + span - 1}"
    marks = "".join(
        style(end.mark * _length(bar[decision], highest), fg=end.colour) for decision, end in BAR_STYLES.items()
    )
    return f"{minutes:>9} min  {marks} {sum(bar.values()) or ''}".rstrip()


def _length(count: int, highest: int) -> int:
    """At least one mark for a single rollout: it may be the one that matters."""
    return max(1, round(count * _WIDTH / highest)) if count else 0
