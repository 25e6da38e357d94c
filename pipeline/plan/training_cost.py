"""Hours and dollars of a training run by way of buying: checkpoints, interruptions, lengths of capacity blocks."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from nxpipe.emulator.hardware.instance import Instance
from nxpipe.pipeline.config.capacity import DRAINED_BEFORE_THE_END, IN_CAPACITY_BLOCKS, NEVER_SPOT
from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Prices, Purchase
from nxpipe.pipeline.plan.training import TrainingCandidate, TrainingClock, TrainingJob, fastest, least_memory
from nxpipe.pipeline.plan.training_memory import checkpoint_bytes, rank_bytes
from nxpipe.pipeline.predict.work import NotPredicted

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


@dataclass(frozen=True)
class Checkpoints:
    """Interruptions and what they take. Any instance's interruption stops the run, as collectives span all."""

    monthly: float = 0.2  # share of spot instances that EC2 interrupts in a month; AWS's advisor names 5 to over 20 %
    seconds: float | None = None  # to write one checkpoint; None: its bytes at `rate`
    rate: float = 1e9  # bytes a second of each instance to storage
    restart: float = 900.0  # seconds until a run goes on: new instances, programs from the cache, the last checkpoint

    def written_in(self, c: TrainingCandidate) -> float:
        """Seconds of one checkpoint; all instances write their share at once."""
        if self.seconds is not None:
            return self.seconds
        return checkpoint_bytes(c.job.sizes, c.layout) / (self.rate * c.count)

    def between_interruptions(self, instances: int) -> float:
        """The mean seconds to the first interruption of any of so many instances; infinite without interruptions."""
        rate = -math.log1p(-self.monthly) / (HOURS_A_MONTH * 3600)
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
    def of(cls, c: TrainingCandidate, checkpoints: Checkpoints) -> "Spot":
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
    """The sizes of the fewest blocks that hold so many instances; None if an account cannot have them.

    A number between two sizes is the larger one: instances of two blocks may be far apart.
    """
    if count > _BLOCK_INSTANCES:
        return None
    whole, rest = divmod(count, BLOCK_SIZES[-1])
    last = [next(size for size in BLOCK_SIZES if size >= rest)] if rest else []
    return [BLOCK_SIZES[-1]] * whole + last


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
    c: TrainingCandidate, tokens: float, prices: Prices, region: str, checkpoints: Checkpoints | None = None
) -> Iterator[Offer]:
    """Each way in which the instances are sold, and its hours and dollars for a number of tokens."""
    spread, name = c.hours_between(tokens), c.instance.name
    for purchase in Purchase:
        if purchase is Purchase.CAPACITY_BLOCK and (name not in IN_CAPACITY_BLOCKS or block_sizes(c.count) is None):
            continue
        if purchase is Purchase.SPOT and name in NEVER_SPOT:
            continue
        hours, note = spread, ""
        billed, count = spread, c.count
        if purchase is Purchase.SPOT:
            spot = Spot.of(c, checkpoints or Checkpoints())
            hours = billed = _scaled(spread, 1 + spot.waste)
            note = f"a checkpoint every {duration(spot.interval)}, {spot.waste:.1%} of the time lost"
        elif purchase is Purchase.CAPACITY_BLOCK:
            blocks = [block_days(each) for each in spread]
            billed = (24.0 * sum(blocks[0]), 24.0 * sum(blocks[1]), 24.0 * sum(blocks[2]))
            sizes = block_sizes(c.count) or []
            count = sum(sizes)
            note = f"blocks of {' + '.join(map(str, sizes))} instances for {' + '.join(map(str, blocks[1]))} days"
        price = prices.price(region, name, purchase)
        if price is None:
            yield Offer(purchase, hours, None, note=note)
            continue
        dollars = _scaled(billed, price.hourly * count)
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


OFFERED: Final = (Purchase.ON_DEMAND, Purchase.SPOT, Purchase.CAPACITY_BLOCK)  # without a commitment of years


@dataclass(frozen=True)
class TrainingDemand:
    """What a plan is requested for: tokens to train on, and the bounds of money and time."""

    tokens: float
    region: str
    purchases: Sequence[Purchase] = OFFERED
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    deadline: float | None = None  # hours
    budget: float | None = None  # dollars


@dataclass(frozen=True)
class TrainingChoice:
    """Instances with their fastest layout, and what they cost in each way of buying."""

    candidate: TrainingCandidate
    offers: Sequence[Offer]
    hours: float  # of work, without interruptions

    def cheapest(self, demand: TrainingDemand) -> Offer | None:
        """Of the ways that the demand allows and whose price is known; by expected dollars, then by hours."""
        known = [each for each in self.offers if each.dollars and each.purchase in demand.purchases]
        kept = [each for each in known if _within(each, demand)] or known
        return min(kept, key=lambda each: (each.dollars[1] if each.dollars else math.inf, each.hours[1]), default=None)

    def meets(self, demand: TrainingDemand) -> bool:
        offer = self.cheapest(demand)
        if offer is None:  # of an unknown price
            return demand.budget is None and (demand.deadline is None or self.hours <= demand.deadline)
        return _within(offer, demand)


def _within(offer: Offer, demand: TrainingDemand) -> bool:
    """Whether the expected hours and dollars are within the deadline and the budget."""
    dollars = offer.dollars[1] if offer.dollars else math.inf
    return (demand.deadline is None or offer.hours[1] <= demand.deadline) and (
        demand.budget is None or dollars <= demand.budget
    )


@dataclass(frozen=True)
class TrainingPlan:
    """Choices that meet the demand, the cheapest first, and the reasons why others do not."""

    job: TrainingJob
    demand: TrainingDemand
    choices: Sequence[TrainingChoice]
    refused: Sequence[str]
    given: TrainingChoice | None = None  # the layout of an imported configuration

    @property
    def best(self) -> TrainingChoice | None:
        return self.choices[0] if self.choices else None

    def is_close(self, choice: TrainingChoice) -> bool:
        """Whether its dollars may be less than the cheapest one's. Choices on one instance type have one error, so
        that their order does not depend on it."""
        best = self.best
        if best is None or choice.candidate.instance == best.candidate.instance:
            return False
        first, other = best.cheapest(self.demand), choice.cheapest(self.demand)
        return bool(first and other and first.dollars and other.dollars and other.dollars[0] <= first.dollars[2])


def plan_training(
    job: TrainingJob, demand: TrainingDemand, instances: Sequence[Instance], counts: Sequence[int], prices: Prices
) -> TrainingPlan:
    """The fastest layout on each number of instances of each type, ranked by dollars; unknown prices come last."""
    choices, refused = [], []
    for instance in instances:
        try:
            clock = TrainingClock.of(job, instance)
        except NotPredicted as reason:
            refused.append(f"{instance.name}: {reason}")
            continue
        for count in counts:
            found = fastest(clock, count)
            if found is None:
                refused.append(_unfit(clock, count))
                continue
            choice = choice_of(found, demand, prices)
            if choice.meets(demand):
                choices.append(choice)
            else:
                refused.append(f"{count} x {instance.name}: {_missed(choice, demand)}")
    return TrainingPlan(job, demand, sorted(choices, key=lambda each: _rank(each, demand)), refused)


def choice_of(found: TrainingCandidate, demand: TrainingDemand, prices: Prices) -> TrainingChoice:
    listed = offers(found, demand.tokens, prices, demand.region, demand.checkpoints)
    return TrainingChoice(found, tuple(listed), found.hours(demand.tokens))


def _rank(choice: TrainingChoice, demand: TrainingDemand) -> tuple[float, float]:
    offer = choice.cheapest(demand)
    return (offer.dollars[1] if offer and offer.dollars else math.inf, choice.hours)


def _unfit(clock: TrainingClock, count: int) -> str:
    where, least = f"{count} x {clock.instance.name}", least_memory(clock, count)
    if least is None:
        return f"{where}: no layout divides its ranks, {clock.job.sequences} sequences and the model's heads and layers"
    need, available = least.memory.total / 2**30, rank_bytes(clock.instance) / 2**30
    return f"{where}: the least full layout, {least.layout}, needs {need:.1f} GiB of a rank's {available:.1f} GiB"


def _missed(choice: TrainingChoice, demand: TrainingDemand) -> str:
    offer = choice.cheapest(demand)
    hours = offer.hours[1] if offer else choice.hours
    if demand.deadline is not None and hours > demand.deadline:
        return f"{duration(3600 * hours)}, beyond the deadline of {duration(3600 * demand.deadline)}"
    if offer is None or offer.dollars is None:
        return "its price is not known, so that no budget can hold"
    return f"${offer.dollars[1]:,.0f}, beyond the budget of ${demand.budget:,.0f}"
