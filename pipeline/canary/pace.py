"""How fast a rollout looks and waits. A plan says what is proved, the pace when: it changes no verdict.

A minute of the plan is one `period`, so that a rollout can be rehearsed in seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from nxpipe.pipeline.canary.errors import PlanInvalid

_MOST_TRIES: Final = 1_000  # a history holds that many, and all that comes after them


@dataclass(frozen=True)
class Pace:
    period: int = 60  # seconds that a count of requests is made over
    poll: int = 60  # seconds from one look to the next
    settle: int = 120  # seconds until a count is not expected to change any more
    warm: int = 15  # seconds from one look at new instances to the next
    warm_tries: int = 240  # looks, until they are held to be unobtainable
    final: int = 10  # minutes that all traffic has to go well before the old version goes
    patience: int = 1_440  # minutes that a person has to answer when the evidence does not

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("settle", "patience") else 1
            if type(value) is not int or value < least:
                raise PlanInvalid(f"The pace of the rollout has {field.name} = {value!r}: write a number from {least}.")
        if self.warm_tries > _MOST_TRIES:
            raise PlanInvalid(
                f"The pace of the rollout has warm_tries = {self.warm_tries}: write at most {_MOST_TRIES}, and a "
                "longer `warm`."
            )

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Pace":
        unknown = sorted(set(document) - {field.name for field in fields(Pace)})
        if unknown:
            raise PlanInvalid(f"The pace of the rollout has {', '.join(unknown)}, which mean nothing: leave them out.")
        return Pace(**document)
