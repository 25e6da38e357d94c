"""What the judge remembers from one question to the next. It travels through a state machine as one text, which no
service reads or writes anew: a number that three services have spelled is not always the same number.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from nxpipe.pipeline.canary.alone import Alone
from nxpipe.pipeline.canary.answers import Open
from nxpipe.pipeline.canary.canonical import spelled
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Moment
from nxpipe.pipeline.canary.metrics import beginning_of, minute_of, queries
from nxpipe.pipeline.canary.pace import Pace
from nxpipe.pipeline.canary.plan import Plan

_DISCARDED: Final = 1  # minutes of a step that are not counted, for caches are cold


@dataclass(frozen=True)
class Course:
    """Where a rollout stands."""

    name: str  # of the execution
    plan: Plan
    pace: Pace
    balancer: str
    canary: str  # target groups, as metrics call them
    stable: str
    alarms: tuple[str, ...]
    evidence: Evidence = field(default_factory=Evidence)
    alone: Alone = field(default_factory=Alone)
    opened: tuple[Open, Open] = (Open(), Open())  # requests without an answer, of canary and stable
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

    def begin(self, step: int, at: str) -> "Course":
        """Its first minute is the one after this, but for what is discarded. What has not settled yet of the step
        before belongs to that one, and will be counted there.
        """
        begun = self.minute(at) + 1 + _DISCARDED
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
            "from": beginning_of(first, self.pace.period),
            "queries": queries(self.balancer, arms, self.plan.latencies, self.pace.period),
        }

    def text(self) -> str:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        kept_as = {"plan": self.plan.as_json(), "pace": vars(self.pace), "evidence": self.evidence.as_json()}
        opened = [each.as_json() for each in self.opened]
        return spelled(fields | kept_as | {"alone": vars(self.alone), "opened": opened})

    @staticmethod
    def from_text(text: str) -> "Course":
        fields = json.loads(text)
        plan, pace = Plan.from_json(fields.pop("plan")), Pace.from_json(fields.pop("pace"))
        evidence, alarms = Evidence.from_json(fields.pop("evidence")), tuple(fields.pop("alarms"))
        alone = Alone(**fields.pop("alone"))
        canary, stable = map(Open.from_json, fields.pop("opened", ([], [])))  # an older judge kept none
        return Course(
            plan=plan, pace=pace, evidence=evidence, alone=alone, alarms=alarms, opened=(canary, stable), **fields
        )


def kept(name: str, number: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Where a document is kept, and as what: as a text, so that its digest is that of what is read again. Number 0 is
    the plan, and those after it are the looks.
    """
    return {"key": f"{name}/{number:06}.json", "record": {"text": spelled(document)}}
