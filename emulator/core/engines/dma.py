"""Semantics of the DMA queues: elements move between HBM and SBUF, or from HBM to HBM."""

from collections.abc import Mapping
from typing import Final

from nxpipe.emulator.core.access import Bound, Handler, move
from nxpipe.emulator.isa.dma import DmaCopy, DmaTranspose
from nxpipe.emulator.isa.instruction import Instruction


def dma_copy(_: DmaCopy, at: Bound) -> None:
    move(at.window("src"), at.window("dst"))


def dma_transpose(_: DmaTranspose, at: Bound) -> None:
    dst, src = at.window("dst"), at.window("src")
    dst.put_bits(src.bits().reshape(src.flat).T)


HANDLERS: Final[Mapping[type[Instruction], Handler]] = {DmaCopy: dma_copy, DmaTranspose: dma_transpose}
