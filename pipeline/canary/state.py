"""What the judge remembers from one question to the next. It travels through a state machine as one text, which no
service reads or writes anew: a number that three services have spelled is not always the same number.
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
    """Where a rollout stands."""

    name: str  # of the execution
    plan: CanaryPlan
    pace: Schedule
    balancer: str
    canary: str  # target groups, as metrics call them
    stable: str
    alarms: tuple[str, ...]
    evidence: Evidence = field(default_factory=Evidence)
    alone: FullTrafficTest = field(default_factory=FullTrafficTest)
    opened: tuple[UnansweredRequests, UnansweredRequests] = (
        UnansweredRequests(),
        UnansweredRequests(),
    )  # requests without an answer, of canary and stable
    step: int = 0
    begun: int = 0  # the first minute of the step that counts
    due: int | None = None  # the first minute that was not taken in yet
    looks: int = 0
    looks_here: int = 0  # in this execution
    asked: int | None = None  # the minute from which on a person is awaited
    previous: str | None = None  # the digest of the last record

    @property
    def over(self) -> bool:
        """All steps are: the new version has all traffic, and the old one is kept until that has gone well."""
        return self.step >= len(self.plan.steps)

    def minute(self, at: str) -> int:
        return minute_of(at, self.pace.period)

    def begin(self, step: int, at: str) -> "RolloutState":
        """Its first minute is the one after this, but for what is discarded. What has not settled yet of the step
        before belongs to that one, and will be counted there.
        """
        begun = self.minute(at) + 1 + WARMUP_MINUTES
        due = begun if self.due is None else self.due
        return replace(self, step=step, begun=begun, due=due, looks_here=0, asked=None)

    def settled(self, at: str) -> range:
        """The minutes since the last look whose counts will not change any more."""
        first = self.begun if self.due is None else self.due
        return range(first, max(first, minute_of(at, self.pace.period, earlier=self.pace.settle)))

    def moment(self, at: str) -> Moment:
        return Moment(self.step, self.begun, max(self.begun, self.minute(at)))

    def question(self, at: str) -> dict[str, Any]:
        """What to ask CloudWatch at the next look; which has no answer to a question about the future."""
        first = min(self.settled(at).stop, self.minute(at) - 1)
        arms = {"canary": self.canary, "stable": self.stable}
        return {
            "from": start_of(first, self.pace.period),
            "queries": queries(self.balancer, arms, self.plan.latencies, self.pace.period),
        }

    def text(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        kept_as = {"plan": self.plan.as_json(), "pace": vars(self.pace), "evidence": self.evidence.as_json()}
        opened = [each.as_json() for each in self.opened]
        return canonical_json(fields | kept_as | {"alone": vars(self.alone), "opened": opened})

    @staticmethod
    def from_text(text: str) -> "RolloutState":
        fields = json.loads(text)
        plan, pace = CanaryPlan.from_json(fields.pop("plan")), Schedule.from_json(fields.pop("pace"))
        evidence, alarms = Evidence.from_json(fields.pop("evidence")), tuple(fields.pop("alarms"))
        alone = FullTrafficTest(**fields.pop("alone"))
        canary, stable = map(UnansweredRequests.from_json, fields.pop("opened", ([], [])))  # an older judge kept none
        return RolloutState(
            plan=plan, pace=pace, evidence=evidence, alone=alone, alarms=alarms, opened=(canary, stable), **fields
        )


def stored_document(name: str, number: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Where a document is kept, and as what: as a text, so that its digest is that of what is read again. Number 0 is
    the plan, and those after it are the looks.
    """
    return {"key": f"{name}/{number:06}.json", "record": {"text": canonical_json(document)}}
