"""Text of rollouts: the status page, the screen that follows a rollout, a status line for logs, the table of
evaluations, the histogram of simulations.

Every page fits a width; texts wrap between words.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nxpipe.pipeline.canary.constants import SUSPICION
from nxpipe.pipeline.canary.explanation import explain, latency, milliseconds, odds, percent
from nxpipe.pipeline.canary.judge import Decision, Judgement
from nxpipe.pipeline.canary.metrics import Arm
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.aws import RolloutExecution
from nxpipe.pipeline.rollout.course import Course, CoursePhase, EvaluationRecord
from nxpipe.pipeline.rollout.forecast import StepProgress, TimeLeft
from nxpipe.pipeline.rollout.status import Phase, RolloutEnd, Status
from nxpipe.pipeline.util.text import Column, paragraph, style, table, unstyled

if TYPE_CHECKING:
    from nxpipe.pipeline.rollout.simulate import SimulatedRollout

WIDTHS: Final = (60, 200)  # of pages, in columns
_BAR: Final = 24  # characters; half of it on a narrow terminal
_COLOURS: Final = {"blue": "blue", "green": "green"}
_ENDS: Final = {
    RolloutEnd.PROMOTED: ("promoted", "green"),
    RolloutEnd.ROLLED_BACK: ("rolled back", "red"),
    RolloutEnd.CAPACITY_BLOCKED: ("capacity blocked: the new version never had traffic", "yellow"),
    RolloutEnd.REFUSED: ("refused: nothing was changed", "red"),
    RolloutEnd.UNFINISHED: ("failed; the watchdog is rolling back", "yellow"),
}


def status_page(status: Status, width: int = 80, *, events: int = 3) -> str:
    """The whole status at one moment, with the last events."""
    width = min(max(width, WIDTHS[0]), WIDTHS[1])
    return "\n".join(line for block in _blocks(status, width, events) for line in block).rstrip()


def watch_frame(status: Status, width: int, height: int) -> list[str]:
    """The lines of one screen. What does not fit is left out from the end, but for the last line."""
    width = min(max(width - 1, WIDTHS[0] - 1), WIDTHS[1])
    *blocks, last = [*_blocks(status, width, events=5), _keys(status, width)]
    lines, space = [line for block in blocks for line in block], max(1, height - len(last))
    if len(lines) > space:
        hidden = len(lines) - space + 1
        lines = [*lines[: space - 1], style(f"  ({hidden} more lines; enlarge the terminal)", dim=True)]
    return [*lines, *last]


def _keys(status: Status, width: int) -> list[str]:
    hint = f"Ctrl-C leaves; the rollout continues. Abort it with: nxpipe rollout abort {status.fleet}"
    return [style(line, dim=True) for line in paragraph(hint, width)]


def status_line(status: Status) -> str:
    """One line for a log."""
    weights, place = _plain_weights(status), _place(status)[0]
    if status.outcome:
        sentence = status.sentence or ""
        return f"{weights}; {sentence if sentence.startswith(_ENDED) else f'{place}; {sentence}'}"
    if status.undecided or (progress := status.progress) is None:
        return f"{weights}; {place}"
    return f"{weights}; {place}; to advance: {_to_advance(status, progress)}; regression: {_regression(progress)}"


_ENDED: Final = ("Promoted", "Rolled back", "Refused", "Aborted")  # how sentences about an end begin


def state_of(status: Status) -> tuple[object, ...]:
    """What a log reports at once when it changes; evidence alone is reported now and then."""
    verdict = status.verdict
    kind = verdict.decision if verdict else None
    end = status.outcome.end if status.outcome else None
    step = status.step if verdict else None
    return tuple(status.weights.items()), status.phase, step, kind, status.signal, end


# Blocks of the page


def _blocks(status: Status, width: int, events: int) -> Iterator[list[str]]:
    yield _title(status, width)
    if sentence := _sentence(status):
        yield [style(line, bold=True) for line in paragraph(sentence, width, first="  ", others="  ")]
    yield [""]
    yield _rows(_facts(status, width), width)
    course = status.course
    if course is None or not course.evaluations:
        return
    if versions := _versions(status, course, width):
        yield ["", *versions]
    yield ["", *_timeline(status, course, width)]
    if happened := course.events[-events:]:
        yield ["", *_events(happened, width)]


def _title(status: Status, width: int) -> list[str]:
    execution = status.execution
    if execution is None:
        return [style(f"Fleet {status.fleet}", bold=True)]
    rollout = execution.input
    way = f": {rollout.candidate.name}, {rollout.old} -> {rollout.new}" if rollout else ""
    lines = [style(line, bold=True) for line in paragraph(f"Fleet {status.fleet}{way}", width)]
    name = style(f"rollout {execution.name}", dim=True)
    if len(unstyled(lines[-1])) + 2 + len(unstyled(name)) <= width:
        return [*lines[:-1], f"{lines[-1]}  {name}"]
    return [*lines, name]


def _sentence(status: Status) -> str | None:
    """What is known, unless the facts below say it all: a step that is under way."""
    decision = status.verdict.decision if status.verdict else None
    is_plain = status.outcome is None and decision in (None, Decision.CONTINUE) and status.phase is not Phase.FINAL
    return None if is_plain and not _has_news(status) else status.sentence


def _has_news(status: Status) -> bool:
    evaluation = status.evaluation
    return (
        evaluation is not None
        and not evaluation.reason.startswith("Not decided yet")
        and evaluation.step == status.step
    )


@dataclass(frozen=True)
class _Fact:
    """A row of the page: label, bar and text."""

    label: str
    text: str
    bar: str = ""
    colour: str | None = None


def _facts(status: Status, width: int) -> Iterator[_Fact]:
    length = _BAR if width >= 79 else _BAR // 2
    yield _Fact("traffic", _plain_weights(status), _traffic(status, length))
    words, colour = _place(status)
    yield _Fact("state", words, colour=colour)
    if progress := status.progress:
        yield _Fact("to advance", _to_advance(status, progress), _bar(progress.advance, length, "green"))
        yield _Fact("regression", _regression(progress), _bar(progress.regression, length, "red"))
        name = status.fleet
        if status.undecided:
            yield _Fact("decide with", f"nxpipe rollout approve {name}, or nxpipe rollout abort {name}")
        else:
            yield _Fact("would stop it", _stops(status, progress))
    if status.signal:
        yield _Fact("signal", f"{status.signal}; it takes effect at the next evaluation")


def _rows(facts: Iterator[_Fact], width: int) -> list[str]:
    rows = list(facts)
    label = max(len(fact.label) for fact in rows)
    lines = []
    for fact in rows:
        begin = f"  {fact.label:{label}}  " + (f"{fact.bar}  " if fact.bar else "")
        indent = len(unstyled(begin))
        texts = paragraph(fact.text, width - indent)
        first, *others = [style(text, fg=fact.colour, bold=True) if fact.colour else text for text in texts]
        lines += [f"{begin}{first}", *(" " * indent + line for line in others)]
    return lines


def _to_advance(status: Status, progress: StepProgress) -> str:
    evidence = f"{percent(progress.advance)} of the evidence needed"
    if status.undecided:
        return evidence
    if status.verdict and status.verdict.decision is Decision.FROZEN:
        return f"{evidence}; on hold while the stable version itself fails too often"
    if progress.regression >= SUSPICION:
        return f"{evidence}; on hold while a regression is suspected"
    if progress.advance >= 1:
        return f"{evidence}; {progress.bake} more min of evidence are required" if progress.bake else evidence
    return f"{evidence}; {_time(progress.until_advance, progress.limit)}"


def _regression(progress: StepProgress) -> str:
    if not round(100 * progress.regression):
        return "none"
    evidence = f"{percent(progress.regression)} of the evidence that rolls back"
    left = progress.until_rollback
    if progress.regression >= 1 or left is None:
        return evidence
    if left.chance < 0.5:
        return f"{evidence}; not expected to grow to it"
    # The latest time only: many rollbacks come before the range, since a regression may prove itself in a minute.
    within = f"the {progress.limit} min left" if left.latest is None else f"{left.latest} min"
    return f"{evidence}, likely within {within}"


def _time(left: TimeLeft | None, limit: int) -> str:
    """The range of the time that is still expected, in words."""
    if left is None:
        return "time unknown: no requests were counted yet"
    if left.earliest is None:
        return f"time unknown: at the present rates not within the {limit} min left"
    if left.latest is None:
        return f"{left.earliest} min or more left; the step ends in {limit} min"
    if left.earliest == left.latest:
        return f"about {left.latest} min left"
    return f"{left.earliest} to {left.latest} min left"


def _stops(status: Status, progress: StepProgress) -> str:
    evaluation = status.evaluation
    alarms = evaluation.alarms if evaluation else {}
    active = sorted(name for name, state in alarms.items() if state == "ALARM")
    ways = ["100 % of the evidence of a regression"]
    if alarms:
        ways.append(f"{', '.join(active)} active" if active else f"any of {len(alarms)} alarms, none active")
    limit = f"the step's limit in {progress.limit} min (then an operator decides)"
    return ", ".join([*ways, limit, f"nxpipe rollout abort {status.fleet}"])


def _place(status: Status) -> tuple[str, str | None]:
    """Where the rollout is, with a colour if that is more than progress."""
    if status.outcome:
        return _ENDS[status.outcome.end]
    if status.phase is Phase.NONE:
        return "no rollout yet", None
    if status.phase is Phase.STARTING:
        return "starting, or left by a command that was killed; start it again", None
    if status.phase is Phase.FILLING:
        return "instances of the new version are starting", None
    if status.phase is Phase.FINAL:
        return "full traffic; instances of the old version still run", None
    return _step(status, status.plan) if status.plan else ("under way", None)


def _step(status: Status, plan: CanaryPlan) -> tuple[str, str | None]:
    where, verdict = _phase_name(plan, status.step), status.verdict
    if verdict is None:
        return f"{where}, starting", None
    if status.evaluation and status.evaluation.action == "roll_back":
        return f"{where}: rolling back", "red"
    if status.undecided:
        return f"{where}: undecided, an operator must decide", "yellow"
    shortest, longest = plan.bake(status.step)
    where = f"{where}, minute {verdict.minutes} of {shortest} to {longest}"
    if verdict.decision is Decision.FROZEN:
        return f"{where}: on hold", "yellow"
    return where, None


def _phase_name(plan: CanaryPlan, phase: int) -> str:
    if plan.shadow is not None and plan.is_shadow(phase):
        return f"shadow, {plan.shadow.percent:g} % of requests mirrored"
    return f"step {_number(plan, phase)} of {len(plan.steps)}, at {plan.phases[phase].weight} %"


def _number(plan: CanaryPlan | None, phase: int) -> str:
    """The number of a step as people count them: a shadow phase is before the first."""
    if plan is None or plan.shadow is None:
        return str(phase + 1)
    return str(phase) if phase else "shadow"


def _traffic(status: Status, length: int) -> str:
    """Current weights of the load balancer."""
    whole = sum(status.weights.values()) or 1
    shares = {colour: weight for colour, weight in status.weights.items() if weight}
    marks = {colour: max(1, round(weight * length / whole)) for colour, weight in shares.items()}
    if marks:
        largest = max(marks, key=marks.__getitem__)
        marks[largest] += length - sum(marks.values())
    filled = "".join(
        style({"blue": "=", "green": "#"}.get(colour, "-") * count, fg=_COLOURS.get(colour))
        for colour, count in marks.items()
    )
    return f"[{filled}]"


def _plain_weights(status: Status) -> str:
    whole = sum(status.weights.values()) or 1
    return ", ".join(f"{colour} {100 * weight / whole:g} %" for colour, weight in status.weights.items() if weight)


def _bar(share: float, length: int, colour: str) -> str:
    """A share of evidence; the bar is full only at the threshold."""
    filled = length if share >= 1 else min(length - 1, round(length * share))
    return f"[{style('#' * filled, fg=colour)}{'.' * (length - filled)}]"


def _versions(status: Status, course: Course, width: int) -> list[str]:
    """Errors and latencies of both versions in the current or last phase."""
    at = len(course.totals) - 1
    if at < 0 or not course.totals[at].stable.requests:
        return []
    totals, plan = course.totals[at], course.plan
    rollout = status.execution.input if status.execution else None
    names = (f"new, {rollout.new}", f"stable, {rollout.old}") if rollout else ("new", "stable")
    is_shadow = plan.is_shadow(at)
    rows = [
        (name, *_arm(plan, arm, "mirrored" if is_shadow and name.startswith("new") else ""))
        for name, arm in zip(names, (totals.canary, totals.stable), strict=True)
    ]
    header = ("requests", "failed or differed" if is_shadow else "failed", "rate", "p50", "p99")
    columns = len(header) if plan.latencies and not is_shadow else 3
    title = f"{course.phases[at].name}" if is_shadow else f"at {course.phases[at].name}"
    return table((title, *header[:columns]), [row[: 1 + columns] for row in rows], width, indent="  ").split("\n")


def _arm(plan: CanaryPlan, arm: Arm, kind: str) -> tuple[str, ...]:
    rate = f"{arm.errors / arm.requests:.2%}".replace("%", " %") if arm.requests else "-"
    quantiles = (_latency(plan, arm, name) for name in ("p50", "p99"))
    return (f"{arm.requests:,} {kind}".rstrip(), f"{arm.errors:,}", rate, *quantiles)


def _latency(plan: CanaryPlan, arm: Arm, name: str) -> str:
    if not arm.timed or not plan.latencies:
        return "-"
    if (found := latency(plan, arm, name)) is not None:
        return milliseconds(found)
    is_below = bool(arm.slower) and arm.slower[0] < arm.timed * (1 - int(name[1:]) / 100)
    return f"below {milliseconds(plan.latencies[0])}" if is_below else f"above {milliseconds(plan.latencies[-1])}"


_DECIDED: Final = {
    Decision.ADVANCE: ("advanced", "green"),
    Decision.ROLL_BACK: ("rolled back", "red"),
    Decision.UNDECIDED: ("undecided", "yellow"),
    Decision.FROZEN: ("on hold", "yellow"),
    Decision.CONTINUE: ("ended", None),
}


def timeline(course: Course, width: int, current: int | None = None, *, full: str = "", indent: str = "") -> str:
    """A row for each phase; `current` is the phase that is under way, `full` the state of full traffic."""
    rows = [_phase_row(phase, at == current, at > (current or 0)) for at, phase in enumerate(course.phases)]
    rows.append(("100 %", "", full, "", ""))
    if not any(phase.totals for phase in course.phases):
        rows = [row[:3] for row in rows]
    header = ("traffic", "minutes", "state", "new: failed", "stable: failed")
    return table(header[: len(rows[0])], rows, width, indent=indent)


def _phase_row(phase: CoursePhase, is_current: bool, is_later: bool) -> tuple[str, ...]:
    words, colour = _DECIDED[phase.decision] if phase.decision else ("", None)
    if is_current and phase.decision in (None, Decision.CONTINUE, Decision.ADVANCE):
        words, colour = "now", None
    counts = [f"{arm.errors:,} of {arm.requests:,}" for arm in _arms(phase)] or ["", ""]
    minutes = "" if phase.minutes is None else f"{phase.minutes:,}"
    state = style(words, fg=colour) if colour else words
    return (phase.name, minutes, "" if is_later and phase.minutes is None else state, *counts)


def _arms(phase: CoursePhase) -> list[Arm]:
    totals = phase.totals
    return [totals.canary, totals.stable] if totals and totals.stable.requests else []


def _timeline(status: Status, course: Course, width: int) -> list[str]:
    current = status.step if status.phase in (Phase.SHADOW, Phase.STEP) else None
    full = "now" if status.phase is Phase.FINAL else ""
    if status.outcome and status.outcome.end is RolloutEnd.PROMOTED:
        full = style("promoted", fg="green")
    return timeline(course, width, current, full=full, indent="  ").split("\n")


def _events(events: Sequence[EvaluationRecord], width: int) -> list[str]:
    lines = [style("  last events", bold=True)]
    for event in events:
        at = event.at.replace("T", " ")[11:16]
        lines += paragraph(event.reason.split("\n")[0], width, first=f"  {at}  ", others=" " * 9)
    return lines


def course_page(course: Course, width: int) -> str:
    """A recorded rollout: how it ended or how far it is, and its phases."""
    full = style("promoted", fg="green") if course.is_promoted else ""
    text = "\n".join(paragraph(course.summary or "No evaluation yet.", width))
    return f"{text}\n\n{timeline(course, width, full=full)}"


def explanations(course: Course, judgements: Sequence[Judgement]) -> str:
    """The figures of the last verdict of each phase."""
    last = {judged.verdict.step: judged for judged in judgements}
    return "\n\n".join(
        explain(course.plan, judged.evidence, course.totals[: len(judged.evidence.steps)], judged.verdict)
        for judged in last.values()
    )


_HEADER: Final = (
    Column("at", whole=True, drop=2),
    "step",
    "new: failed",
    Column("stable: failed", drop=3),
    "for",
    "against",
    Column("action", drop=1),
    "reason",
)


def evaluation_table(execution: RolloutExecution, evaluations: Sequence[EvaluationRecord]) -> str:
    """Counts are those of the minutes that an evaluation read; evidence is cumulative, as odds."""
    rollout = execution.input
    title = f"{execution.name}: {rollout.candidate.name}, {rollout.old} -> {rollout.new}" if rollout else execution.name
    if not evaluations:
        return f"{title}\nNo evaluation yet."
    plan = rollout.plan if rollout else None
    rows = [_row(plan, evaluation) for evaluation in evaluations]
    return f"{title}\n{table(_HEADER, rows)}"


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
_MARGIN: Final = 22  # columns beside the marks of a histogram


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


def duration_histogram(outcomes: "Sequence[SimulatedRollout]", width: int = 80) -> str:
    """One bar per span of minutes; its marks are rollouts, by their end."""
    longest = max(outcome.minutes for outcome in outcomes)
    span = -(-(longest + 1) // _BARS)
    ended = Counter((outcome.minutes // span, outcome.decision) for outcome in outcomes)
    bars = [{decision: ended[bar, decision] for decision in BAR_STYLES} for bar in range(longest // span + 1)]
    highest = max(sum(bar.values()) for bar in bars)
    longest_bar = min(80, max(20, width - _MARGIN))
    return "\n".join(_line(at * span, span, bar, longest_bar / highest) for at, bar in enumerate(bars))


def _line(first: int, span: int, bar: dict[Decision, int], scale: float) -> str:
    minutes = f"{first}" if span == 1 else f"{first}-{first + span - 1}"
    marks = "".join(
        style(end.mark * _length(bar[decision], scale), fg=end.colour) for decision, end in BAR_STYLES.items()
    )
    return f"{minutes:>9} min  {marks} {sum(bar.values()) or ''}".rstrip()


def _length(count: int, scale: float) -> int:
    """At least one mark for a single rollout: it may be the one that matters."""
    return max(1, round(count * scale)) if count else 0
