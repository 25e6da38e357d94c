"""From graphs to programs of instructions."""

from emulator.lower import moving, pointwise, products, rows
from emulator.lower.lowering import LOWERINGS, NotLowered, lower

__all__ = ["LOWERINGS", "NotLowered", "lower", "moving", "pointwise", "products", "rows"]
