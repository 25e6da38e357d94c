"""What DMA queues do: move elements between HBM and SBUF, or from HBM to HBM."""

from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.core.cells import floats
from nxpipe.emulator.core.places import Window
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.dma import DmaCopy, DmaTranspose

_WORDS = (DType.INT32, DType.UINT32, DType.INT64, DType.UINT64)


def dma_copy(_: DmaCopy, at: Bound) -> None:
    move(at.window("src"), at.window("dst"))


def dma_transpose(_: DmaTranspose, at: Bound) -> None:
    dst, src = at.window("dst"), at.window("src")
    dst.put_bits(src.bits().reshape(src.flat).T)


def move(src: Window, dst: Window) -> None:
    """Equal types bit by bit, others through float32, but integers of the same 32 or 64 bits."""
    if same_bits(src.dtype, dst.dtype):
        dst.put_bits(src.bits())
    else:
        dst.put(floats(src.numbers()))


def same_bits(one: DType, other: DType) -> bool:
    return one is other or (one in _WORDS and other in _WORDS and one.itemsize == other.itemsize)
