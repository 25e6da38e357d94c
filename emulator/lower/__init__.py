"""Back end: the program of instructions that a graph is lowered to. Importing the package registers every operator's
lowering in `LOWERINGS`."""

from nxpipe.emulator.lower import attention, convolution, gather, movement, norm, pooling, reduce, sort
from nxpipe.emulator.lower.backend import BACKEND, lower, record_text
from nxpipe.emulator.lower.lowering import LOWERINGS, NotLowered
from nxpipe.emulator.lower.matmul import experts, linear

__all__ = [
    "BACKEND",
    "LOWERINGS",
    "NotLowered",
    "attention",
    "convolution",
    "experts",
    "gather",
    "linear",
    "lower",
    "movement",
    "norm",
    "pooling",
    "record_text",
    "reduce",
    "sort",
]
