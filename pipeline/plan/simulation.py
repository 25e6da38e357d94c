"""Discrete-event simulation of one replica: when each request gets its first token and its last."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from nxpipe.pipeline.plan.schedulers import Replica, Running, StepTimes, server_of
from nxpipe.pipeline.plan.traffic import Request


@dataclass(frozen=True)
class Outcome:
    """What a replica did. Times are in seconds, of the answered requests in the order of arrival."""

    requests: int
    refused: int
    seconds: float  # from the first arrival to the last token
    ttft: Sequence[float]
    tpot: Sequence[float]  # of requests with more than one token
    latency: Sequence[float]
    tokens: int
    prompt_tokens: int
    busy: float  # share of the time in which a program runs

    def ttft_at(self, quantile: float) -> float:
        return quantile_of(self.ttft, quantile)

    def tpot_at(self, quantile: float) -> float:
        return quantile_of(self.tpot, quantile)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def quantile_of(values: Sequence[float], quantile: float) -> float:
    """The smallest value that is not below this share of all; infinite without any."""
    if not values:
        return math.inf
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(quantile * len(ordered)) - 1))]


def simulate(
    requests: Sequence[Request], replica: Replica, steps: StepTimes, *, concurrency: int | None = None
) -> Outcome:
    """Run requests through a replica. With `concurrency` so many clients each send their next request when they have
    the answer to the last, in place of the arrivals."""
    server = server_of(replica, steps)
    pending = [
        (0.0 if concurrency else each.arrival, number)
        for number, each in enumerate(requests[:concurrency] if concurrency else requests)
    ]
    heapify(pending)
    sent, refused, arrivals = len(pending), 0, {}
    answered = 0
    start = pending[0][0] if pending else 0.0
    server.clock = start
    while pending or not server.is_idle:
        while pending and pending[0][0] <= server.clock:
            at, number = heappop(pending)
            arrivals[number] = at
            if replica.queue is not None and len(server.waiting) >= replica.queue:
                refused += 1
                continue
            server.waiting.append(Running(number, requests[number]))
        if server.is_idle:
            if pending:
                server.clock = max(server.clock, pending[0][0])
            continue
        server.advance(pending[0][0] if pending else math.inf)
        while answered < len(server.finished):
            answered += 1
            if concurrency and sent < len(requests):
                heappush(pending, (server.finished[answered - 1].done, sent))
                sent += 1
    return _outcome(server.finished, arrivals, len(requests), refused, server.busy, start)


def _outcome(
    finished: list[Running], arrivals: dict[int, float], count: int, refused: int, busy: float, start: float
) -> Outcome:
    finished.sort(key=lambda each: each.number)
    end = max((each.done for each in finished), default=start)
    between = [(each.done - each.first) / (each.request.output - 1) for each in finished if each.request.output > 1]
    return Outcome(
        requests=count,
        refused=refused,
        seconds=end - start,
        ttft=[each.first - arrivals[each.number] for each in finished],
        tpot=between,
        latency=[each.done - arrivals[each.number] for each in finished],
        tokens=sum(each.request.output for each in finished),
        prompt_tokens=sum(each.request.prompt for each in finished),
        busy=min(1.0, busy / (end - start)) if end > start else 0.0,
    )
