"""What a rollout was asked to do: the input of its execution, which nobody changes afterwards."""

import json
from dataclasses import dataclass
from typing import Any

from nxpipe.artifact_store.names import short_name
from nxpipe.pipeline.canary.documents import CanaryError
from nxpipe.pipeline.canary.plan import CanaryPlan, Schedule


@dataclass(frozen=True)
class Candidate:
    """The artifact that is to take over, and what the fleet's channel was when that was decided."""

    model: str
    target: str
    artifact: str  # request key
    channel: str
    generation: int  # of the channel; 0 while it is empty

    @property
    def name(self) -> str:
        return short_name(self.model, self.artifact)


@dataclass(frozen=True)
class Asked:
    old: str
    new: str  # colour
    candidate: Candidate
    plan: CanaryPlan
    pace: Schedule
    by: str
    reason: str

    def text(self) -> str:
        return json.dumps(
            {
                "from": self.old,
                "to": self.new,
                **vars(self.candidate),
                "plan": self.plan.as_json(),
                "pace": vars(self.pace),
                "by": self.by,
                "reason": self.reason,
            }
        )

    @staticmethod
    def from_text(text: str) -> "Asked | None":
        """None where somebody has started the machine by hand, and told it less than this."""
        given: dict[str, Any] = json.loads(text)
        try:
            return Asked(
                given["from"],
                given["to"],
                Candidate(**{name: given[name] for name in Candidate.__dataclass_fields__}),
                CanaryPlan.from_json(given["plan"]),
                Schedule.from_json(given["pace"]),
                given["by"],
                given["reason"],
            )
        except (KeyError, TypeError, CanaryError):
            return None
