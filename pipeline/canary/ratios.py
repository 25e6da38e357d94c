"""The grid of odds ratios on which evidence is kept, and how bets are spread over it.

Constants of the method: none is tuned to a service. Against a canary, most is bet where a minute is worth most, on
ratios of 2 to 12: a smaller one needs hours whatever is bet, and a larger one shows at once. For a canary, most is
bet on a ratio of 1, which is what a healthy version has.
"""

import math
from functools import lru_cache
from typing import Final

# ratio: (the bet when the question is "worse than ...?", the bet when it is "better than ...?")
_BETS: Final = {
    0.25: (1.0, 0.5),
    0.5: (1.0, 1.0),
    0.75: (1.0, 2.0),
    1.0: (1.0, 16.0),
    1.25: (0.5, 0.5),
    1.5: (1.0, 0.5),
    2.0: (3.0, 0.5),
    3.0: (3.0, 0.5),
    5.0: (3.0, 0.5),
    8.0: (3.0, 0.5),
    12.0: (2.0, 0.5),
    20.0: (1.0, 0.5),
    50.0: (0.5, 0.5),
    100.0: (0.5, 0.5),
}


@lru_cache(maxsize=64)
def grid_with(asked: tuple[float, ...]) -> tuple[float, ...]:
    """The grid, with ratios that a plan asks about, on which nothing is bet."""
    return tuple(sorted({*_BETS, *asked}))


@lru_cache(maxsize=256)
def bets_above(grid: tuple[float, ...], ratio: float) -> tuple[tuple[int, float], ...]:
    """Where on the grid is bet that the ratio is above this one, and the logarithm of how much of one unit."""
    return _shared([(at, _BETS[r][0]) for at, r in enumerate(grid) if r > ratio and r in _BETS])


@lru_cache(maxsize=256)
def bets_below(grid: tuple[float, ...], ratio: float) -> tuple[tuple[int, float], ...]:
    return _shared([(at, _BETS[r][1]) for at, r in enumerate(grid) if r < ratio and r in _BETS])


def _shared(bets: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    whole = math.fsum(bet for _, bet in bets)
    return tuple((at, math.log(bet / whole)) for at, bet in bets)
