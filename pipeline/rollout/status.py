"""Status of a rollout: its phase, its outcome, its evaluations, and the evidence that they add up to.

AWS holds the execution, the weights and the fleet's record; the store holds the evaluation records.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from nxpipe.artifact_store import Store
from nxpipe.pipeline.canary.evalues import interval
from nxpipe.pipeline.canary.judge import Decision, Verdict
from nxpipe.pipeline.canary.metrics import METRICS
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.aws import SUCCEEDED, RolloutExecution, StateMachine
from nxpipe.pipeline.rollout.course import Course, EvaluationLog, EvaluationRecord
from nxpipe.pipeline.rollout.forecast import StepProgress

_UNCHANGED: Final = ("Refused", "Busy")  # Fail states of a machine that has changed nothing


class RolloutEnd(StrEnum):
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled_back"  # for any reason: all traffic is with the baseline
    CAPACITY_BLOCKED = "capacity_blocked"
    REFUSED = "refused"  # it did not start
    UNFINISHED = "unfinished"  # its execution failed, and the watchdog is still rolling back


@dataclass(frozen=True)
class RolloutOutcome:
    end: RolloutEnd
    reason: str


def outcome_of(machine: StateMachine, execution: RolloutExecution) -> RolloutOutcome | None:
    """The outcome of the last rollout, or of one with an output; None while it runs."""
    if execution.running:
        return None
    if execution.status == SUCCEEDED:
        output = execution.output
        ends = {
            RolloutEnd.PROMOTED.value: RolloutEnd.PROMOTED,
            RolloutEnd.CAPACITY_BLOCKED.value: RolloutEnd.CAPACITY_BLOCKED,
        }
        return RolloutOutcome(ends.get(output["outcome"], RolloutEnd.ROLLED_BACK), _plain(output["reason"]))
    error, cause = execution.fault
    why = _plain(cause) or error or f"its execution was {execution.status.lower().replace('_', ' ')}"
    if execution.input is None or machine.failed_in(execution.arn) in _UNCHANGED:
        return RolloutOutcome(RolloutEnd.REFUSED, why)
    item = machine.record.read()
    if item.owner == execution.arn:
        return RolloutOutcome(RolloutEnd.UNFINISHED, why)
    return RolloutOutcome(RolloutEnd.PROMOTED if item.stable == execution.input.new else RolloutEnd.ROLLED_BACK, why)


def _plain(cause: str) -> str:
    """The message of a cause: an error of a Lambda function is a JSON document."""
    try:
        document = json.loads(cause)
    except ValueError:
        return cause
    return str(document["errorMessage"]) if isinstance(document, dict) and "errorMessage" in document else cause


ANSWERS: Final = ("approve", "abort")  # signals that decide an undecided step


class Phase(StrEnum):
    NONE = "none"  # no rollout yet
    STARTING = "starting"  # the lock is held, the execution not started
    FILLING = "filling"  # instances of the candidate are being started
    SHADOW = "shadow"  # the candidate gets copies of requests; no traffic has moved
    STEP = "step"
    FINAL = "final"  # the candidate has all traffic; the baseline still runs
    ENDED = "ended"


_JUDGED: Final = (Phase.SHADOW, Phase.STEP)


@dataclass(frozen=True)
class Status:
    fleet: str
    phase: Phase
    weights: Mapping[str, int]
    execution: RolloutExecution | None
    outcome: RolloutOutcome | None
    signal: str | None  # of a person
    course: Course | None  # None if there is no rollout whose input can be read

    @property
    def evaluation(self) -> EvaluationRecord | None:
        """The last evaluation."""
        return self.course.evaluations[-1] if self.course and self.course.evaluations else None

    @property
    def verdict(self) -> Verdict | None:
        """The last verdict of the current step."""
        return (
            self.evaluation.verdict
            if self.evaluation and self.phase in _JUDGED and self.evaluation.step == self.step
            else None
        )

    @property
    def step(self) -> int:
        """The number of the current step, from 0; the shadow phase is the first. It may have no evaluation yet."""
        return _step_after(self.evaluation) or 0

    @property
    def over(self) -> bool:
        """True if nothing more will happen. A failed execution is over after the watchdog has rolled back."""
        return self.phase is Phase.NONE or (self.outcome is not None and self.outcome.end is not RolloutEnd.UNFINISHED)

    @property
    def undecided(self) -> bool:
        """True if a person has to decide."""
        verdict = self.verdict
        return verdict is not None and verdict.decision is Decision.UNDECIDED and self.signal not in ANSWERS

    @property
    def plan(self) -> CanaryPlan | None:
        return self.course.plan if self.course else None

    @property
    def progress(self) -> StepProgress | None:
        """How far the current phase is, and how long it is expected to take; None before its first evaluation."""
        verdict = self.verdict
        return self.course.progress(verdict) if self.course and verdict else None

    @property
    def sentence(self) -> str | None:
        """The verdict in one sentence: how the rollout has ended, or what is known of the current phase."""
        if self.outcome:
            return self._end(self.outcome)
        return self.evaluation.reason.split("\n")[0] if self.evaluation else None

    def _end(self, outcome: RolloutOutcome) -> str:
        """A rollback's reason is the judge's sentence; that of a promotion is the same for all."""
        course, reason = self.course, outcome.reason.split("\n")[0]
        if outcome.end is RolloutEnd.PROMOTED and course and course.totals:
            return course.promotion()
        return reason

    def ratio(self, metric: int) -> tuple[float, float] | None:
        """The confidence sequence for the odds ratio of candidate and baseline in this metric."""
        course = self.course
        return interval(course.plan, course.evidence.steps, metric) if course and course.totals else None

    def as_json(self) -> dict[str, Any]:
        execution, verdict, plan, progress = self.execution, self.verdict, self.plan, self.progress
        rollout = execution.input if execution else None
        return {
            "fleet": self.fleet,
            "phase": self.phase,
            "weights": dict(self.weights),
            "execution": execution and execution.name,
            "started": execution and execution.started.isoformat(),
            "ended": execution and execution.ended and execution.ended.isoformat(),
            "from": rollout and rollout.old,
            "to": rollout and rollout.new,
            "artifact": rollout and vars(rollout.candidate),
            "by": rollout and rollout.by,
            "step": self.step if self.phase in _JUDGED else None,
            "steps": plan and [phase.weight for phase in plan.phases],
            "minutes": verdict and verdict.minutes,
            "progress": progress and progress.as_json(),
            "phases": self.course and [phase.as_json() for phase in self.course.phases],
            "sentence": self.sentence,
            "verdict": verdict and verdict.decision,
            "evidence": verdict and plan and _evidence(plan, verdict),
            "ratios": verdict and {name: _finite(self.ratio(metric)) for metric, name in enumerate(METRICS)},
            "awaits_a_person": self.undecided,
            "signal": self.signal,
            "reason": self.evaluation.reason if self.evaluation else None,
            "outcome": self.outcome and {"end": self.outcome.end, "reason": self.outcome.reason},
        }


def _evidence(plan: CanaryPlan, verdict: Verdict) -> dict[str, Any]:
    """Evidence and thresholds, in nats."""
    return {
        "worse": verdict.worse,
        "worse_by_metric": dict(zip(METRICS, verdict.worse_by_metric, strict=True)),
        "rolls_back_at": math.log(1 / plan.alpha),
        "better": verdict.better,
        "advances_at": math.log(1 / plan.beta),
    }


def _finite(interval: tuple[float, float] | None) -> list[float | None] | None:
    """JSON has no infinity."""
    return interval and [bound if math.isfinite(bound) else None for bound in interval]


class StatusReader:
    """Reads the status of a fleet's rollout repeatedly; immutable data is read once."""

    def __init__(self, machine: StateMachine, store: Store) -> None:
        self._machine = machine
        self._store = store
        self._log: EvaluationLog | None = None
        self._course: Course | None = None

    def status(self, execution: str | None = None) -> Status:
        """Status of the execution with this ARN; by default of the running rollout, else of the last one."""
        weights, item = self._machine.weights(), self._machine.record.read()
        arn = execution or item.owner
        run = self._machine.execution(arn) if arn else self._machine.last()
        if run is None:
            phase = Phase.STARTING if arn else Phase.NONE
            return Status(self._machine.fleet, phase, weights, None, None, None, None)
        course = self._read(run)
        outcome = outcome_of(self._machine, run)
        signal = item.signal if item.owner == run.arn else None
        phase = phase_of(run, weights, course)
        return Status(self._machine.fleet, phase, weights, run, outcome, signal, course)

    def _read(self, execution: RolloutExecution) -> Course | None:
        """None if no plan is known yet: an execution that was started by hand has it in its log alone."""
        if self._log is None or not self._log.folder.endswith(f"/{execution.name}/"):
            self._log = EvaluationLog.at(self._store, self._machine.fleet, execution.name)
            self._course = None
        course = self._course or _empty_course(execution, self._log)
        if course is None:
            return None
        self._course = course.after(self._log.refresh()[len(course.evaluations) :])
        return self._course


def _empty_course(execution: RolloutExecution, log: EvaluationLog) -> Course | None:
    if execution.input is not None:
        return Course(execution.input.plan)
    plan = log.plan_text()
    return Course(CanaryPlan.from_json(json.loads(plan))) if plan else None


def phase_of(execution: RolloutExecution, weights: Mapping[str, int], course: Course | None) -> Phase:
    if not execution.running:
        return Phase.ENDED
    if course is None or not course.evaluations:
        moved = execution.input is not None and weights[execution.input.new] > 0
        return Phase.STEP if moved else Phase.FILLING
    step, plan = _step_after(course.evaluations[-1]), course.plan
    if step is None or step >= len(plan.phases):
        return Phase.FINAL
    return Phase.SHADOW if plan.is_shadow(step) else Phase.STEP


def _step_after(evaluation: EvaluationRecord | None) -> int | None:
    """The step that the state machine is at or about to begin; None at full traffic."""
    if evaluation is None:
        return 0
    return evaluation.step if evaluation.step is None or evaluation.action != "advance" else evaluation.step + 1
