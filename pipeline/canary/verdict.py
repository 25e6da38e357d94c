"""What the judge says, and the numbers that it rests on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Decision(StrEnum):
    CONTINUE = "continue"
    FROZEN = "frozen"
    ADVANCE = "advance"
    ROLL_BACK = "roll_back"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Verdict:
    """Evidence is in nats: the natural logarithm of an e-value."""

    decision: Decision
    step: int
    minutes: int  # that the step has lasted, frozen ones left out
    worse: float  # against the canary, all metrics together
    worse_by_metric: tuple[float, ...]
    better: float  # for the next step: no worse than it tolerates, or within the objective
    set_aside: tuple[str, ...] = ()  # what of this call could not be taken in, and why

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Verdict":
        fields = dict(document)
        return Verdict(
            decision=Decision(fields.pop("decision")),
            worse_by_metric=tuple(fields.pop("worse_by_metric")),
            set_aside=tuple(fields.pop("set_aside")),
            **fields,
        )
