"""Requests that got no answer at all, from two counts that need not fall into the same minute.

A target that hangs, crashes or closes the connection has no answer: the load balancer sends a 502 or a 504 in its
place, which it counts for itself and not for the target group. What is left is the difference: a request was sent to
the group, and no target answered it.

A request may be counted in one minute and its answer in the next, so that the difference of one minute says little,
and the balance of all minutes is kept: how many requests were open at the end of each. Of those, the ones of the last
minute that came within the slowest latency of its end may still be in flight. What remains above the highest remainder
so far is new, and counts as unanswered. So healthy versions have none, however much of their traffic is in flight, and
a version that stops to answer has more in every minute.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nxpipe.pipeline.canary.counts import Count, whole


@dataclass(frozen=True)
class Open:
    """Requests without an answer, since the first minute of a rollout."""

    now: int = 0
    most: int = 0  # that were overdue at any time, as far as they have been counted
    busiest: int = 0  # requests in one minute: at most so many were open when the rollout began

    @staticmethod
    def from_json(document: Sequence[int]) -> "Open":
        return Open(*document)

    def as_json(self) -> list[int]:
        return [self.now, self.most, self.busiest]

    def after(self, requests: Count, answers: Count, *, failed: Count, in_flight: float) -> tuple["Open", Count]:
        """A minute later, and how many requests have proved to be without an answer: at most so many as the minute has
        beside its `failed` ones, the rest in the next. `in_flight` is the share of a minute's requests that may be open
        at its end. A minute that cannot be changes nothing.
        """
        if not all(whole(count) and count >= 0 for count in (requests, answers, failed)):
            return self, 0
        busiest = max(self.busiest, int(requests))
        now = max(-busiest, self.now + int(requests) - int(answers))
        overdue = now - math.ceil(int(requests) * in_flight)
        proved = max(0, min(overdue - self.most, int(requests - failed)))
        return Open(now, self.most + proved, busiest), proved
