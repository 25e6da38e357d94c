"""What a proxy remembers: each request, and what became of it."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from tests.faults.plan import Fault, Plan, Request
from tests.faults.wire import Head

UNDER_WAY: Final = "under way"


class Cut(Exception):
    """Ends a connection on purpose."""


@dataclass
class Exchange:
    """One request; `outcome` is final before its client can know the answer."""

    request: Request
    fault: Fault | None
    received: int = 0  # bytes of the request's body
    status: int | None = None  # what the client was told, if it was told
    outcome: str = UNDER_WAY
    held: bool = False
    dropped: bool = False
    let_go: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def cut(self, outcome: str) -> Cut:
        self.outcome = outcome
        return Cut(outcome)

    async def hold(self) -> None:
        """Until the test lets it go, or drops it."""
        self.held = True
        await self.let_go.wait()
        if self.dropped:
            raise self.cut("dropped while it was held")


@dataclass
class Run:
    """What happens under one plan. A request belongs to the run in which it came in."""

    plan: Plan
    exchanges: list[Exchange] = field(default_factory=list)

    def begin(self, head: Head) -> Exchange:
        request = Request.of(head, len(self.exchanges) + 1)
        self.exchanges.append(Exchange(request, self.plan.fault(request)))
        return self.exchanges[-1]

    @property
    def held(self) -> list[Exchange]:
        return [each for each in self.exchanges if each.held]

    @property
    def settled(self) -> bool:
        return all(each.outcome != UNDER_WAY or each.held for each in self.exchanges)
