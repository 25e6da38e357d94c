"""Hours and dollars of a training run by way of buying: checkpoints, interruptions, lengths of capacity blocks."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from nxpipe.pipeline.config.capacity import DRAINED_BEFORE_THE_END, IN_CAPACITY_BLOCKS, NEVER_SPOT
from nxpipe.pipeline.config.prices import Prices, Purchase
from nxpipe.pipeline.plan.training import Candidate
from nxpipe.pipeline.plan.training_memory import checkpoint_bytes

# Capacity blocks: days by one to 14, then by seven to 182; they end at 11:30 UTC. At most 64 instances of a block, in
# these sizes, and 256 over all blocks of an account (EC2 user guide, "Find and purchase Capacity Blocks").
BLOCK_DAYS: Final = (*range(1, 15), *range(21, 183, 7))
BLOCK_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
_BLOCK_INSTANCES: Final = 256
_BLOCK_TIME: Final = time(11, 30, tzinfo=UTC)
_TERMS: Final = {  # years for which a commitment is paid
    Purchase.SAVINGS_PLAN_1Y: 1,
    Purchase.SAVINGS_PLAN_3Y: 3,
    Purchase.RESERVED_1Y: 1,
    Purchase.RESERVED_3Y: 3,
}
_HOURS_OF_YEAR: Final = 8760
_HOURS_OF_MONTH: Final = 730


@dataclass(frozen=True)
class Checkpoints:
    """Interruptions and what they take. Any instance's interruption stops the run, as collectives span all."""

    monthly: float = 0.2  # share of spot instances that EC2 interrupts in a month; AWS's advisor names 5 to over 20 %
    seconds: float | None = None  # to write one checkpoint; None: its bytes at `rate`
    rate: float = 1e9  # bytes a second of each instance to storage
    restart: float = 900.0  # seconds until a run goes on: new instances, programs from the cache, the last checkpoint

    def written_in(self, c: Candidate) -> float:
        """Seconds of one checkpoint; all instances write their share at once."""
        if self.seconds is not None:
            return self.seconds
        return checkpoint_bytes(c.job.sizes, c.layout) / (self.rate * c.count)

    def between_interruptions(self, instances: int) -> float:
        """The mean seconds to the first interruption of any of so many instances; infinite without interruptions."""
        rate = -math.log1p(-self.monthly) / (_HOURS_OF_MONTH * 3600)
        return 1 / (rate * instances) if rate else math.inf


def young(write: float, between: float) -> float:
    """Young's interval between checkpoints, seconds of work, from those to write one and between interruptions."""
    return math.sqrt(2 * write * between)


def daly(write: float, between: float) -> float:
    """Daly's interval of higher order (2006, equation 37), which holds for long checkpoints too."""
    if math.isinf(between):
        return math.inf
    if write >= 2 * between:
        return between
    share = write / (2 * between)
    return young(write, between) * (1 + math.sqrt(share) / 3 + share / 9) - write


def slowdown(interval: float, write: float, between: float, restart: float) -> float:
    """The expected time of a run over that of its work, interruptions as a Poisson process (Daly 2006, equation 20)."""
    if math.isinf(between):
        return 1.0 if math.isinf(interval) else 1 + write / interval
    try:
        return between * math.exp(restart / between) * math.expm1((interval + write) / between) / interval
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Spot:
    """The best interval of checkpoints on the spot market and what it costs in time."""

    interval: float  # seconds of work between two checkpoints
    write: float
    between: float
    waste: float  # share of the work's time that checkpoints, lost work and restarts add

    @classmethod
    def of(cls, c: Candidate, checkpoints: Checkpoints) -> "Spot":
        write, between = checkpoints.written_in(c), checkpoints.between_interruptions(c.count)
        interval = daly(write, between) if write > 0 else c.step.seconds
        interval = max(interval, c.step.seconds)  # a checkpoint is between two steps
        return cls(interval, write, between, slowdown(interval, write, between, checkpoints.restart) - 1)


def block_days(hours: float) -> list[int]:
    """The days of capacity blocks, one after the other, in which a run of so many hours ends; few blocks first.

    Each block loses what its instances are drained before the end. A run that one block cannot hold continues from its
    checkpoint in the next.
    """
    drained, blocks, left = DRAINED_BEFORE_THE_END / timedelta(hours=1), list[int](), hours
    longest = BLOCK_DAYS[-1]
    while left > 24 * longest - drained:
        blocks.append(longest)
        left -= 24 * longest - drained
    blocks.append(next(days for days in BLOCK_DAYS if 24 * days - drained >= left))
    return blocks


def block_sizes(count: int) -> list[int] | None:
    """The sizes of the blocks that hold so many instances, the fewest blocks; None if an account cannot have them."""
    if count > _BLOCK_INSTANCES:
        return None
    whole, rest = divmod(count, BLOCK_SIZES[-1])
    sizes = [BLOCK_SIZES[-1]] * whole
    for size in reversed(BLOCK_SIZES):
        if rest >= size:
            sizes.append(size)
            rest -= size
    return sizes


def block_end(start: date, days: int) -> tuple[datetime, datetime]:
    """Start and end of a block of whole days."""
    first = datetime.combine(start, _BLOCK_TIME)
    return first, first + timedelta(days=days)


@dataclass(frozen=True)
class Offer:
    """A way of buying a run. Hours and dollars are (low, expected, high); dollars are None if the price is unknown."""

    purchase: Purchase
    hours: tuple[float, float, float]
    dollars: tuple[float, float, float] | None
    hourly: float | None = None
    dated: date | None = None
    source: str = ""
    note: str = ""


def offers(
    c: Candidate, tokens: float, prices: Prices, region: str, checkpoints: Checkpoints | None = None
) -> Iterator[Offer]:
    """Each way in which the instances are sold, and its hours and dollars for a number of tokens."""
    work, name = c.hours(tokens), c.instance.name
    spread = (work / c.step.factor, work, work * c.step.factor)
    for purchase in Purchase:
        if purchase is Purchase.CAPACITY_BLOCK and (name not in IN_CAPACITY_BLOCKS or block_sizes(c.count) is None):
            continue
        if purchase is Purchase.SPOT and name in NEVER_SPOT:
            continue
        hours, note = spread, ""
        billed = spread
        if purchase is Purchase.SPOT:
            spot = Spot.of(c, checkpoints or Checkpoints())
            hours = billed = _scaled(spread, 1 + spot.waste)
            note = f"a checkpoint every {duration(spot.interval)}, {spot.waste:.1%} of the time lost"
        elif purchase is Purchase.CAPACITY_BLOCK:
            blocks = [block_days(each) for each in spread]
            billed = (24.0 * sum(blocks[0]), 24.0 * sum(blocks[1]), 24.0 * sum(blocks[2]))
            sizes = " + ".join(map(str, block_sizes(c.count) or ()))
            note = f"{' + '.join(map(str, blocks[1]))} days of {sizes}"
        price = prices.price(region, name, purchase)
        if price is None:
            yield Offer(purchase, hours, None, note=note)
            continue
        dollars = _scaled(billed, price.hourly * c.count)
        if years := _TERMS.get(purchase):
            whole = years * _HOURS_OF_YEAR * c.count * price.hourly
            note = f"${whole:,.0f} are committed over {years} year{'s' if years > 1 else ''}, used or not"
        yield Offer(purchase, hours, dollars, price.hourly, price.date, price.source, note)


def _scaled(values: tuple[float, float, float], factor: float) -> tuple[float, float, float]:
    return (values[0] * factor, values[1] * factor, values[2] * factor)


def duration(seconds: float) -> str:
    """A duration in the largest fitting unit: 42 s, 17 min, 3.5 h, 12.1 days."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 72 * 3600)):
        if seconds < most:
            return f"{seconds / size:.{0 if unit != 'h' else 1}f} {unit}"
    return f"{seconds / 86400:,.1f} days" if math.isfinite(seconds) else "never"
