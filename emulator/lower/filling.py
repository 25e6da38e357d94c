"""One number for all elements of a view in HBM."""

from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.vector import Memset
from nxpipe.emulator.lower.kernel import Kernel
from nxpipe.emulator.lower.lanes import held
from nxpipe.emulator.lower.sheets import sheets
from nxpipe.emulator.lower.view import View


def fill(k: Kernel, view: View, number: float) -> None:
    """From whole rows: reading one element again and again would cost DMA a descriptor for each."""
    for rows, width, (piece,) in sheets(k, [view]):
        with k.room():
            block = k.tile(view.dtype, rows, width)
            k.emit(Memset(engine=Engine.GPSIMD, dst=block.whole, value=held(number, view.dtype)))
            k.copy(piece.far(), block.whole)
