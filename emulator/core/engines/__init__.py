"""Semantics of the instructions: a module for each of `emulator.isa`, with a handler for each of its records.

Collectives are apart in `engines.collective.EXCHANGES`, as they need all ranks.
"""

from collections.abc import Mapping
from typing import Final

from nxpipe.emulator.core.access import Handler
from nxpipe.emulator.core.engines import dma, gpsimd, scalar, tensor, vector
from nxpipe.emulator.isa.instruction import Instruction

HANDLERS: Final[Mapping[type[Instruction], Handler]] = {
    **dma.HANDLERS,
    **tensor.HANDLERS,
    **scalar.HANDLERS,
    **vector.HANDLERS,
    **gpsimd.HANDLERS,
}
