"""Records of a proxy: each request and its outcome."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from tests.faults.plan import Fault, Plan, Request
from tests.faults.wire import Head

UNDER_WAY: Final = "under way"


class Cut(Exception):
    """Raised to close a connection on purpose."""


@dataclass
class Exchange:
    """One request; `outcome` is final before the client can know the response."""

    request: Request
    fault: Fault | None
    received: int = 0  # size of the request's body
    status: int | None = None  # status sent to the client, or None
    outcome: str = UNDER_WAY
    held: bool = False
    dropped: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def cut(self, outcome: str) -> Cut:
        self.outcome = outcome
        return Cut(outcome)

    async def hold(self) -> None:
        """Wait until the test releases or drops the request."""
        self.held = True
        await self.let_go.wait()
        if self.dropped:
            raise self.cut("dropped while it was held")


@dataclass
class Run:
    """The requests under one plan. A request belongs to the run in which it arrived."""

    plan: Plan
    exchanges: list[Exchange] = field(default_factory=list)

    def begin(self, head: Head) -> Exchange:
        request = Request.of(head, len(self.exchanges) + 1)
        self.exchanges.append(Exchange(request, self.plan.fault(request)))
        return self.exchanges[-1]

    @property
    def held(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.held]

    @property
    def settled(self) -> bool:
        return all(exchange.outcome != UNDER_WAY or exchange.held for exchange in self.exchanges)
