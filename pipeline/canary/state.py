"""State of a rollout between evaluations, as the state machine carries it.

It travels as one text that no service parses: a number that three services have serialised is not always the same
number. Names of fields are names in that text and in plans of running rollouts: they cannot change.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nxpipe.pipeline.canary.constants import WARMUP_MINUTES
from nxpipe.pipeline.canary.documents import canonical_json
from nxpipe.pipeline.canary.evalues import FullTrafficTest
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Moment
from nxpipe.pipeline.canary.metrics import UnansweredRequests, minute_of, queries, start_of
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule


@dataclass(frozen=True)
class RolloutState:
    """One rollout at the end of an evaluation."""

    name: str  # of the execution
    plan: CanaryPlan
    pace: Schedule
    balancer: str
    canary: str  # target group, as CloudWatch names it
    stable: str
    alarms: tuple[str, ...]
    evidence: Evidence = field(default_factory=Evidence)
    alone: FullTrafficTest = field(default_factory=FullTrafficTest)
    opened: tuple[UnansweredRequests, UnansweredRequests] = (
        UnansweredRequests(),
        UnansweredRequests(),
    )  # unanswered requests of canary and stable
    step: int = 0
    begun: int = 0  # first counted minute of the step
    due: int | None = None  # first minute that was not read yet
    looks: int = 0  # evaluations
    looks_here: int = 0  # evaluations in this execution of the inner state machine
    asked: int | None = None  # minute in which a person was asked to decide
    previous: str | None = None  # the digest of the last record

    @property
    def over(self) -> bool:
        """True at full traffic: all steps have ended. The baseline's instances still run, for a rollback."""
        return self.step >= len(self.plan.steps)

    def minute(self, at: str) -> int:
        return minute_of(at, self.pace.period)

    def begin(self, step: int, at: str) -> "RolloutState":
        """The state at the start of a step. Its first counted minute follows this one and the warm-up. Minutes of the
        previous step that have not settled yet are read later and counted there.
        """
        begun = self.minute(at) + 1 + WARMUP_MINUTES
        due = begun if self.due is None else self.due
        return replace(self, step=step, begun=begun, due=due, looks_here=0, asked=None)

    def settled(self, at: str) -> range:
        """Minutes since the last evaluation whose counts have settled."""
        first = self.begun if self.due is None else self.due
        return range(first, max(first, minute_of(at, self.pace.period, earlier=self.pace.settle)))

    def moment(self, at: str) -> Moment:
        return Moment(self.step, self.begun, max(self.begun, self.minute(at)))

    def question(self, at: str) -> dict[str, Any]:
        """The query of the next evaluation. It starts in the past: CloudWatch rejects an empty range."""
        first = min(self.settled(at).stop, self.minute(at) - 1)
        arms = {"canary": self.canary, "stable": self.stable}
        return {
            "from": start_of(first, self.pace.period),
            "queries": queries(self.balancer, arms, self.plan.latencies, self.pace.period),
        }

    def text(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        encoded = {"plan": self.plan.as_json(), "pace": vars(self.pace), "evidence": self.evidence.as_json()}
        opened = [requests.as_json() for requests in self.opened]
        return canonical_json(fields | encoded | {"alone": vars(self.alone), "opened": opened})

    @staticmethod
    def from_text(text: str) -> "RolloutState":
        fields = json.loads(text)
        plan, pace = CanaryPlan.from_json(fields.pop("plan")), Schedule.from_json(fields.pop("pace"))
        evidence, alarms = Evidence.from_json(fields.pop("evidence")), tuple(fields.pop("alarms"))
        alone = FullTrafficTest(**fields.pop("alone"))
        # A text of an earlier version has no `opened`.
        canary, stable = map(UnansweredRequests.from_json, fields.pop("opened", ([], [])))
        return RolloutState(
            plan=plan, pace=pace, evidence=evidence, alone=alone, alarms=alarms, opened=(canary, stable), **fields
        )


def stored_document(name: str, number: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Key and body of a stored document. The body holds a text, so a reader computes the digest of the same bytes.
    Number 0 is the plan; evaluations follow.
    """
    return {"key": f"{name}/{number:06}.json", "record": {"text": canonical_json(document)}}
