"""How values are combined that meet in one place: in a type that keeps everything until the result is stored."""

from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.lanes import Lanes

COMBINED: Final = {"add": Alu.ADD, "maximum": Alu.MAXIMUM, "minimum": Alu.MINIMUM, "multiply": Alu.MULTIPLY}


@dataclass(frozen=True)
class Sum:
    """In which type values are combined: one that keeps everything until the result is stored."""

    dtype: DType

    @classmethod
    def of(cls, dtype: DType) -> "Sum":
        return cls(DType.FLOAT32 if dtype.is_float else DType.INT32)

    def two(self, lanes: Lanes, op: Alu, left: Tile, right: Tile, dst: Tile) -> Tile:
        return lanes.two(op, left, right, dst) if self.dtype.is_float else lanes.exact(op, left, right, dst)

    def load(self, lanes: Lanes, tile: Tile) -> Tile:
        if self.dtype.is_float:
            return lanes.floats(tile)
        return Words(lanes, self.dtype).load(tile)

    def store(self, lanes: Lanes, src: Tile, dst: Tile, dtype: DType) -> Tile:
        if self.dtype.is_float or dtype is DType.BOOL:
            lanes.copy(src, dst)
        else:
            Words(lanes, self.dtype).store(src, dst, dtype)
        return dst
