"""Status of a rollout: its phase, its outcome, its evaluations, and the evidence that they add up to.

AWS holds the execution, the weights and the fleet's record; the store holds the evaluation records, at
`rollouts/FLEET/EXECUTION/`. The evidence is recomputed from the records with the judge's own functions.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from nxpipe.artifact_store import Store
from nxpipe.pipeline.canary.evalues import interval
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Decision, Moment, Verdict, add_minutes
from nxpipe.pipeline.canary.metrics import METRICS, Batch
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.aws import SUCCEEDED, RolloutExecution, StateMachine

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


@dataclass(frozen=True)
class EvaluationRecord:
    """The decision record of one evaluation. `text` is its canonical form, whose digest the next record holds."""

    record: Mapping[str, Any]
    text: str

    @staticmethod
    def of(stored: bytes) -> "EvaluationRecord":
        text = json.loads(stored)["text"]
        return EvaluationRecord(json.loads(text), text)

    @property
    def number(self) -> int:
        return int(self.record["number"])

    @property
    def at(self) -> str:
        return str(self.record["at"])

    @property
    def step(self) -> int | None:
        """The number of the step, from 0; None at full traffic."""
        return int(self.record["moment"]["step"]) if self.verdict else None

    @property
    def action(self) -> str:
        return str(self.record["word"])

    @property
    def reason(self) -> str:
        """Summary in the first line, figures in the others."""
        return str(self.record["reason"])

    @property
    def verdict(self) -> Verdict | None:
        verdict = self.record["verdict"]
        return Verdict.from_json(verdict) if verdict else None

    @property
    def batches(self) -> list[Batch]:
        return [Batch.from_json(batch) for batch in self.record.get("batches", ())]

    def added_to(self, evidence: Evidence, plan: CanaryPlan) -> Evidence:
        """The evidence after this evaluation, by the judge's own arithmetic."""
        if self.verdict is None:
            return evidence
        return add_minutes(plan, evidence, self.batches, Moment(**self.record["moment"]))[0]


@dataclass
class EvaluationLog:
    """Evaluation records of one rollout; each is read once."""

    store: Store
    folder: str
    known: list[EvaluationRecord] = field(default_factory=list)

    @classmethod
    def at(cls, store: Store, fleet: str, rollout: str) -> "EvaluationLog":
        return cls(store, f"rollouts/{fleet}/{rollout}/")

    def plan_text(self) -> str | None:
        """Record 0; None before the preflight check has passed."""
        stored = self._bytes(self._path(0))
        return str(json.loads(stored)["text"]) if stored else None

    def refresh(self) -> list[EvaluationRecord]:
        """All records so far. Their numbers have no gaps."""
        if not self.known:
            present = self.store.backend.paths(self.folder)
            paths = [self._path(number) for number in range(1, 1 + len(present)) if self._path(number) in present]
            self.known += _read(self.store.backend.each(self._bytes, paths))
        while record := self._bytes(self._path(len(self.known) + 1)):
            self.known.append(EvaluationRecord.of(record))
        return self.known

    def _path(self, number: int) -> str:
        return f"{self.folder}{number:06}.json"

    def _bytes(self, path: str) -> bytes:
        return b"".join(self.store.backend.read(path) or ())


def _read(stored: Iterable[bytes]) -> list[EvaluationRecord]:
    return [EvaluationRecord.of(record) for record in stored]


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
    evaluation: EvaluationRecord | None
    evidence: Evidence

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
        return self.execution.input.plan if self.execution and self.execution.input else None

    @property
    def minutes_left(self) -> int | None:
        """Remaining minutes of the step if evidence keeps growing at its rate so far; None if that is unknown."""
        plan, verdict = self.plan, self.verdict
        if plan is None or verdict is None or verdict.better <= 0:
            return None
        needed = verdict.minutes * math.log(1 / plan.beta) / verdict.better
        shortest, longest = plan.bake(verdict.step)
        left = max(needed, shortest) - verdict.minutes
        return max(0, math.ceil(left)) if verdict.minutes + left <= longest else None

    def ratio(self, metric: int) -> tuple[float, float] | None:
        """The confidence sequence for the odds ratio of candidate and baseline in this metric."""
        return interval(self.plan, self.evidence.steps, metric) if self.plan and self.evidence.steps else None

    def as_json(self) -> dict[str, Any]:
        execution, verdict, plan = self.execution, self.verdict, self.plan
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
            "minutes_left": self.minutes_left,
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
        self._evidence = (0, Evidence())  # of this many evaluations

    def status(self, execution: str | None = None) -> Status:
        """Status of the execution with this ARN; by default of the running rollout, else of the last one."""
        weights, item = self._machine.weights(), self._machine.record.read()
        arn = execution or item.owner
        run = self._machine.execution(arn) if arn else self._machine.last()
        if run is None:
            phase = Phase.STARTING if arn else Phase.NONE
            return Status(self._machine.fleet, phase, weights, None, None, None, None, Evidence())
        evaluations = self._read(run)
        outcome = outcome_of(self._machine, run)
        evaluation = evaluations[-1] if evaluations else None
        signal = item.signal if item.owner == run.arn else None
        phase = _phase(run, weights, evaluation)
        return Status(self._machine.fleet, phase, weights, run, outcome, signal, evaluation, self._evidence[1])

    def _read(self, execution: RolloutExecution) -> list[EvaluationRecord]:
        if self._log is None or not self._log.folder.endswith(f"/{execution.name}/"):
            self._log, self._evidence = (
                EvaluationLog.at(self._store, self._machine.fleet, execution.name),
                (0, Evidence()),
            )
        evaluations, rollout = self._log.refresh(), execution.input
        count, evidence = self._evidence
        if rollout is not None:
            for evaluation in evaluations[count:]:
                evidence = evaluation.added_to(evidence, rollout.plan)
            self._evidence = len(evaluations), evidence
        return evaluations


def _phase(execution: RolloutExecution, weights: Mapping[str, int], evaluation: EvaluationRecord | None) -> Phase:
    if not execution.running:
        return Phase.ENDED
    if evaluation is None:
        moved = execution.input is not None and weights[execution.input.new] > 0
        return Phase.STEP if moved else Phase.FILLING
    step, plan = _step_after(evaluation), execution.input.plan if execution.input else None
    if step is None or (plan is not None and step >= len(plan.phases)):
        return Phase.FINAL
    return Phase.SHADOW if plan is not None and plan.is_shadow(step) else Phase.STEP


def _step_after(evaluation: EvaluationRecord | None) -> int | None:
    """The step that the state machine is at or about to begin; None at full traffic."""
    if evaluation is None:
        return 0
    return evaluation.step if evaluation.step is None or evaluation.action != "advance" else evaluation.step + 1
