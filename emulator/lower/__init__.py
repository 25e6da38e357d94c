"""From graphs to programs of instructions."""

from nxpipe.emulator.lower import (
    along,
    attention,
    collective,
    convolve,
    experts,
    extremes,
    index,
    moving,
    pointwise,
    pool,
    products,
    reduce,
    resample,
    rows,
    running,
    sort,
)
from nxpipe.emulator.lower.lowering import LOWERINGS, NotLowered
from nxpipe.emulator.lower.walk import lower

__all__ = [
    "LOWERINGS",
    "NotLowered",
    "along",
    "attention",
    "collective",
    "convolve",
    "experts",
    "extremes",
    "index",
    "lower",
    "moving",
    "pointwise",
    "pool",
    "products",
    "reduce",
    "resample",
    "rows",
    "running",
    "sort",
]
