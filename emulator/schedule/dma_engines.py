"""The DMA engines of a core, shared by the transfers of all queues.

A transfer uses one engine for each eight partitions. Queues arbitrate round robin at packet boundaries, and packets are
small: transfers progress at once, each at an equal share of the engines, at most at its own rate. A large transfer
therefore delays a small one by as much as the small one takes, not until its own end.

Times and work are whole numbers, so that equal states have equal futures: a rate is a fraction of two whole numbers,
and progress is rounded down when transfers begin or end.
"""

from collections.abc import Iterator
from typing import Final

UNITS: Final = 4096  # of all engines; a transfer's width is its share of them


class DmaEngines:
    """The transfers that move bytes, by queue: what remains of each, in units times picoseconds, and its width."""

    def __init__(self) -> None:
        self._transfers: dict[int, tuple[int, int]] = {}
        self._rates: dict[int, tuple[int, int]] = {}
        self._since = 0  # the time of the last change
        self.next: int | None = None  # the time at which the next transfer ends

    def begin(self, queue: int, now: int, takes: int, width: int) -> None:
        """Begin a transfer that takes so long if it is not disturbed."""
        self._settle(now)
        self._transfers[queue] = (takes * width, width)
        self._share()

    def end(self, now: int) -> list[int]:
        """End the transfers that are complete; returns their queues."""
        self._settle(now)
        queues = [queue for queue, (remaining, _) in self._transfers.items() if remaining <= 0]
        for queue in queues:
            del self._transfers[queue]
        self._share()
        return sorted(queues)

    def state(self, now: int) -> tuple[object, ...]:
        """What determines the future, relative to now."""
        return (now - self._since, *sorted(self._transfers.items())) if self._transfers else ()

    def shift(self, elapsed: int) -> None:
        """Move all times."""
        self._since += elapsed
        if self.next is not None:
            self.next += elapsed

    def _settle(self, now: int) -> None:
        elapsed = now - self._since
        for queue, (remaining, width) in self._transfers.items():
            amount, time = self._rates[queue]
            self._transfers[queue] = (remaining - elapsed * amount // time, width)
        self._since = now

    def _share(self) -> None:
        self._rates = dict(self._shared())
        ends = [
            -(-left * self._rates[queue][1] // self._rates[queue][0]) for queue, (left, _) in self._transfers.items()
        ]
        self.next = self._since + min(ends) if ends else None

    def _shared(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Rates as fractions: equal shares, but what a narrow transfer leaves goes to the others."""
        free, users = UNITS, len(self._transfers)
        for width, queue in sorted((width, queue) for queue, (_, width) in self._transfers.items()):
            if width * users > free:  # so are all that follow, which are as wide at least
                yield queue, (free, users)
                continue
            yield queue, (width, 1)
            free, users = free - width, users - 1
