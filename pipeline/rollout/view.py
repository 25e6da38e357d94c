"""A rollout's status for people: a picture of a few lines, and one line for a log."""

import math
from collections.abc import Iterator
from typing import Final

from nxpipe.pipeline.canary.counts import ERRORS, METRICS
from nxpipe.pipeline.canary.judge import Decision, Verdict, odds
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.looks import Look
from nxpipe.pipeline.rollout.outcome import End
from nxpipe.pipeline.rollout.status import Phase, Status
from nxpipe.pipeline.util.escape import style

_BAR: Final = 24  # characters
_COLOURS: Final = {"blue": "blue", "green": "green"}
_ENDS: Final = {
    End.PROMOTED: ("promoted", "green"),
    End.ROLLED_BACK: ("rolled back", "red"),
    End.CAPACITY_BLOCKED: ("capacity blocked: the new version never had any traffic", "yellow"),
    End.REFUSED: ("refused: nothing was touched", "red"),
    End.UNFINISHED: ("died; the watchdog is bringing traffic home", "yellow"),
}


def picture(status: Status) -> str:
    """Everything, at one moment."""
    rows = [("traffic", _traffic(status))]
    if said := _where(status):
        rows.append(("stands", said))
    plan, verdict = status.plan, status.verdict
    if plan and verdict:
        rows += _evidence(status, plan, verdict)
    if status.look and status.phase is not Phase.ENDED and (said := _news(status.look)):
        rows.append(("said", said))
    if status.signal:
        rows.append(("asked", f"a person said {status.signal}; it is heard at the next look"))
    if status.outcome:
        rows.append(("because", status.outcome.reason))
    width = max(len(name) for name, _ in rows)
    further = "\n" + " " * (width + 4)
    return "\n".join([_title(status), *(f"  {name:{width}}  {text.replace(chr(10), further)}" for name, text in rows)])


def line(status: Status) -> str:
    """For a log, which keeps the ones before."""
    parts = [_plain_weights(status), _where(status) or "no rollout yet"]
    if verdict := status.verdict:
        parts.append(f"for it {odds(verdict.better)}, against it {odds(verdict.worse)}")
    if status.outcome:
        parts.append(status.outcome.reason.split("\n")[0])
    return "; ".join(parts)


def _news(look: Look) -> str | None:
    """That it goes on is no news; that it stands still is."""
    said = look.reason.split("\n")[0]
    return None if said.startswith(Decision.CONTINUE) else said


def _title(status: Status) -> str:
    execution = status.execution
    if execution is None:
        return style(f"Fleet {status.fleet}", bold=True)
    asked = execution.asked
    way = f": {asked.candidate.name}, {asked.old} -> {asked.new}" if asked else ""
    return f"{style(f'Fleet {status.fleet}{way}', bold=True)}  {style(execution.name, dim=True)}"


def _where(status: Status) -> str | None:
    if status.outcome:
        words, colour = _ENDS[status.outcome.end]
        return style(words, fg=colour, bold=True)
    if status.phase is Phase.STARTING:
        return "about to begin, or begun by a command that died: start it again"
    if status.phase is Phase.FILLING:
        return "the new version's instances are being started"
    if status.phase is Phase.FINAL:
        return "all steps are over; the old version is kept for a while"
    return _step(status, status.plan) if status.phase is Phase.STEP and status.plan else None


def _step(status: Status, plan: CanaryPlan) -> str:
    step, verdict = plan.steps[status.step], status.verdict
    where = f"step {status.step + 1} of {len(plan.steps)}, at {step.weight} %"
    if verdict is None:
        return f"{where}, which begins"
    if status.look and status.look.word == "roll_back":
        return f"{where}: {style('going back', fg='red', bold=True)}"
    if status.undecided:
        return f"{where}: {style('a person is awaited', fg='yellow', bold=True)}"
    minutes = f"{where}, minute {verdict.minutes}; at least {plan.bake_min}, at most {plan.bake_max}"
    left = status.minutes_left
    return minutes if left is None else f"{minutes}, probably {left} more"


def _traffic(status: Status) -> str:
    """Each colour by its name; the weights are the load balancer's own."""
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
    """Bars are in nats, for evidence multiplies: half of a bar is the square root of what is asked."""
    better, worse = odds(verdict.better), odds(verdict.worse)
    yield "for it", f"{_bar(verdict.better, plan.beta, 'green')}  {better}; goes on at {1 / plan.beta:g} to 1"
    yield "against", f"{_bar(verdict.worse, plan.alpha, 'red')}  {worse}; goes back at {1 / plan.alpha:g} to 1"
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
