"""Course of a rollout: its evaluation records, and what they add up to.

The store holds the records, at `rollouts/FLEET/EXECUTION/`; `nxpipe rollout replay` reads them from a file. Evidence
and counts are recomputed from them with the judge's own functions.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from nxpipe.artifact_store import Store
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.explanation import PhaseTotals, counts_sentence, totals_after, verdict_sentence
from nxpipe.pipeline.canary.judge import Decision, Moment, Verdict, add_minutes
from nxpipe.pipeline.canary.metrics import Batch
from nxpipe.pipeline.canary.plan import CanaryPlan
from nxpipe.pipeline.rollout.forecast import StepProgress, progress_of


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
        return str(self.record.get("at", ""))

    @property
    def step(self) -> int | None:
        """The number of the step, from 0; None at full traffic."""
        return int(self.record["moment"]["step"]) if self.verdict else None

    @property
    def action(self) -> str:
        return str(self.record["word"])

    @property
    def reason(self) -> str:
        """A sentence in the first line, figures in the others."""
        return str(self.record.get("reason", ""))

    @property
    def alarms(self) -> Mapping[str, str]:
        """The states of the alarms that guard the rollout."""
        found = self.record.get("alarms", {})
        pairs = [(found.get(f"{kind}_names", ()), found.get(f"{kind}_states", ())) for kind in ("metric", "composite")]
        return {name: state for names, states in pairs for name, state in zip(names, states, strict=True)}

    @property
    def verdict(self) -> Verdict | None:
        verdict = self.record["verdict"]
        return Verdict.from_json(verdict) if verdict else None

    @property
    def batches(self) -> list[Batch]:
        return [Batch.from_json(batch) for batch in self.record.get("batches", ())]

    @property
    def moment(self) -> Moment | None:
        return Moment(**self.record["moment"]) if self.verdict else None


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


@dataclass(frozen=True)
class CoursePhase:
    """One phase: its share of traffic, its minutes so far, the last verdict in it, and the counts of both versions."""

    name: str  # "5 %", or "shadow"
    weight: int
    minutes: int | None  # None if it has no evaluation yet
    decision: Decision | None
    totals: PhaseTotals | None

    def as_json(self) -> dict[str, Any]:
        totals = self.totals
        arms = {"new": totals.canary, "stable": totals.stable} if totals else {}
        counts = {name: {"requests": int(arm.requests), "failed": int(arm.errors)} for name, arm in arms.items()}
        return {"name": self.name, "minutes": self.minutes, "decision": self.decision, **counts}


_RECENT: Final = 5  # minutes that the present rate of requests is the mean of


@dataclass(frozen=True)
class Course:
    """All evaluations so far, with the evidence and the counts that they add up to."""

    plan: CanaryPlan
    evaluations: tuple[EvaluationRecord, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    totals: tuple[PhaseTotals, ...] = ()

    def after(self, evaluations: Iterable[EvaluationRecord]) -> "Course":
        course = self
        for evaluation in evaluations:
            course = course._with(evaluation)
        return course

    def _with(self, evaluation: EvaluationRecord) -> "Course":
        seen = (*self.evaluations, evaluation)
        if evaluation.moment is None:
            return replace(self, evaluations=seen)
        batches = evaluation.batches
        evidence, _ = add_minutes(self.plan, self.evidence, batches, evaluation.moment)
        totals = totals_after(self.totals, self.evidence, evidence, batches)
        return replace(self, evaluations=seen, evidence=evidence, totals=totals)

    @property
    def verdicts(self) -> dict[int, Verdict]:
        """The last verdict of each phase."""
        found = (evaluation.verdict for evaluation in self.evaluations)
        return {verdict.step: verdict for verdict in found if verdict}

    @property
    def requests_per_minute(self) -> float:
        """The present rate of both versions' requests."""
        batches = [batch for evaluation in self.evaluations[-2 * _RECENT :] for batch in evaluation.batches]
        recent = sorted(batches, key=lambda batch: batch.minute)[-_RECENT:]
        # Pairs are copies of the stable version's requests.
        counts = [batch.stable.requests + (0 if batch.pairs else batch.canary.requests) for batch in recent]
        return sum(counts) / len(counts) if counts else 0.0

    @property
    def phases(self) -> list[CoursePhase]:
        verdicts = self.verdicts
        return [
            CoursePhase(
                "shadow" if self.plan.is_shadow(at) else f"{phase.weight} %",
                phase.weight,
                verdicts[at].minutes if at in verdicts else None,
                verdicts[at].decision if at in verdicts else None,
                self.totals[at] if at < len(self.totals) else None,
            )
            for at, phase in enumerate(self.plan.phases)
        ]

    @property
    def step_minutes(self) -> int:
        """Minutes from the first phase on until the last evaluation of a phase."""
        moments = [evaluation.moment for evaluation in self.evaluations if evaluation.moment]
        return moments[-1].minute - moments[0].begun if moments else 0

    @property
    def events(self) -> list[EvaluationRecord]:
        """The evaluations at which something happened: the action or the kind of decision is another one."""
        found: list[EvaluationRecord] = []
        kinds: list[tuple[object, ...]] = [("continue", None, Decision.CONTINUE)]
        for evaluation in self.evaluations:
            decision = evaluation.verdict.decision if evaluation.verdict else None
            action = "continue" if evaluation.action == "watch" else evaluation.action
            kind = (action, decision, evaluation.reason.partition(" ")[0])
            if kind != kinds[-1] and (action != "continue" or decision not in (None, Decision.CONTINUE)):
                found.append(evaluation)
            kinds.append(kind)
        return found

    def progress(self, verdict: Verdict) -> StepProgress:
        return progress_of(self.plan, self.evidence, self.totals, verdict, self.requests_per_minute)

    def sentence(self, verdict: Verdict) -> str:
        return verdict_sentence(self.plan, self.evidence, self.totals, verdict)

    @property
    def is_promoted(self) -> bool:
        """True if the last evaluation ended full traffic."""
        last = self.evaluations[-1] if self.evaluations else None
        return last is not None and last.verdict is None and last.action == "advance"

    @property
    def summary(self) -> str | None:
        """How the rollout ended or how far it is; None without an evaluation. A record may have no words of its own."""
        if not self.evaluations:
            return None
        if self.is_promoted and self.totals:
            return self.promotion()
        words = self.evaluations[-1].reason.split("\n")[0]
        return words or (self.sentence(list(self.verdicts.values())[-1]) if self.totals else None)

    def promotion(self) -> str:
        """What a promotion is based on: the counts of all steps, and those at full traffic."""
        counts = counts_sentence(self.plan, self.evidence, self.totals, len(self.totals) - 1, whole=True)
        alone = next((each.reason for each in reversed(self.evaluations) if each.verdict is None), "")
        full = alone.replace("Promoted after", "Then", 1)
        return f"Promoted after {self.step_minutes:,} min of steps: {counts}. {full}".rstrip()
