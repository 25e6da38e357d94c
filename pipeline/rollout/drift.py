"""How fast a bet grows, without drawing a single rollout: a Brownian motion with the bet's own drift and variance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from nxpipe.pipeline.canary.likelihood import log_likelihoods

_ENOUGH: Final = 400  # bad requests in the window in which a drift is read from the exact likelihood
_LONGEST: Final = 60 * 24 * 365  # minutes


@dataclass(frozen=True)
class Rate:
    """One version's minute: requests, and the chance that one of them is bad."""

    requests: float
    bad: float

    @property
    def mean(self) -> float:
        return self.requests * self.bad

    @property
    def variance(self) -> float:
        return self.mean * (1 - self.bad)


@dataclass(frozen=True)
class Growth:
    """Of one bet, in nats a minute. `needed` is what it must grow by; `jump` what one bad request may add at once."""

    needed: float
    drift: float
    variance: float
    jump: float = 0.0

    def chance(self, minutes: float) -> float:
        """That the bet has been won by then; the last jump carries it half its length too far."""
        needed = self.needed + self.jump / 2
        if self.variance <= 0:
            return float(self.drift * minutes >= needed)
        spread = math.sqrt(self.variance * minutes)
        reflected = 2 * self.drift * needed / self.variance + _log_cdf((-self.drift * minutes - needed) / spread)
        return min(1.0, _cdf((self.drift * minutes - needed) / spread) + math.exp(min(0.0, reflected)))


def _cdf(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def _log_cdf(z: float) -> float:
    """Of the normal distribution; far out, where a float knows none, by the first term of Mills' series."""
    return math.log(_cdf(z)) if z > -30 else -z * z / 2 - math.log(-z * math.sqrt(2 * math.pi))


def together(bets: Sequence[Growth]) -> list[Growth]:
    """Bets whose winnings are added up: when the first of them is won, the others have grown as well."""
    rising = [bet for bet in bets if 0 < bet.drift < math.inf]
    if not rising:
        return list(bets)
    soonest = min(bet.needed / bet.drift for bet in rising)
    grown = [bet.drift * soonest - bet.needed for bet in bets]
    help_ = math.log(math.fsum(math.exp(each - max(grown)) for each in grown))
    return [replace(bet, needed=bet.needed - help_) for bet in bets]


def best_chance(bets: Sequence[Growth], minutes: float) -> float:
    return max((bet.chance(minutes) for bet in bets), default=0.0)


def minutes_until(bets: Sequence[Growth], chance: float = 0.5) -> float | None:
    """When one of these bets has been won with this chance; None when it takes more than a year."""
    low, high = 1.0, 1.0  # nobody looks before a minute is over
    while best_chance(bets, high) < chance:
        low, high = high, high * 2
        if high > _LONGEST:
            return None
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if best_chance(bets, middle) >= chance else (middle, high)
    return high


def of_ratio(canary: Rate, stable: Rate, bet: float, null: float, needed: float) -> Growth:
    """Of the bet that the odds ratio is `bet`, against the one that it is `null`."""
    window = _ENOUGH / max(canary.mean + stable.mean, 1e-9)
    n, m = round(canary.requests * window), round(stable.requests * window)
    bad, others = round(canary.mean * window), round(stable.mean * window)
    thetas = [math.log(bet), math.log(null)]

    def grown(bad: int, others: int) -> float:
        at_bet, at_null = log_likelihoods((n, bad), (m, others), thetas)
        return at_bet - at_null

    now = grown(bad, others)
    of_canary, of_stable = grown(bad + 1, others) - now, grown(bad, others + 1) - now
    variance = of_canary**2 * canary.variance + of_stable**2 * stable.variance
    return Growth(needed, now / window, variance, max(of_canary, of_stable, 0.0))


def of_pairs(canary: float, stable: float, bet: float, null: float, needed: float) -> Growth:
    """The same of paired requests; the rates are those of pairs in which one version alone is bad, a minute."""
    both = math.log((1 + bet) / (1 + null))
    of_canary = math.log(bet / null) - both
    drift = of_canary * canary - both * stable
    return Growth(needed, drift, of_canary**2 * canary + both**2 * stable, max(of_canary, 0.0))


def of_objective(canary: Rate, objective: float, share: float, needed: float) -> Growth:
    """Of the bet that the canary's error rate is this share of the objective."""
    of_good = math.log((1 - share * objective) / (1 - objective))
    if share == 0:
        # One error ends it: it is won by those alone that have none for long enough.
        return Growth(needed, of_good * canary.requests if canary.bad == 0 else -math.inf, 0.0)
    of_bad = math.log(share)
    drift = of_bad * canary.mean + of_good * (canary.requests - canary.mean)
    return Growth(needed, drift, (of_bad - of_good) ** 2 * canary.variance)
