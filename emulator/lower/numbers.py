"""Row numbers for indirect copies, from indices of several axes.

An element's place is the sum of its indices times their strides, so in units of what those strides have in common it is
one number. An index outside of its axis must not reach into another row: it becomes a number that no buffer has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.instruction import Alu
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.lower.ending import load
from nxpipe.emulator.lower.integers import Words
from nxpipe.emulator.lower.lanes import Lanes, bits
from nxpipe.emulator.lower.lowering import Lowering
from nxpipe.emulator.lower.sheets import WIDEST, sheets
from nxpipe.emulator.lower.view import View


@dataclass(frozen=True)
class Address:
    """The indices of one axis; with `wraps`, those below zero count from its end."""

    indices: View
    size: int
    stride: int
    wraps: bool = False
    sure: bool = False  # they cannot be outside


def counted(low: Lowering, size: int, stride: int, axis: int, shape: tuple[int, ...]) -> Address:
    """An axis of which every index is taken, one after the other along an axis of the whole."""
    table = low.constant(np.arange(size, dtype=np.int32), DType.INT32)
    strides = tuple(table.strides[0] if each == axis else 0 for each in range(len(shape)))
    return Address(View(table.buffer, table.dtype, table.offset, shape, strides), size, stride, sure=True)


def row_numbers(low: Lowering, addresses: Sequence[Address], shape: tuple[int, ...]) -> tuple[View, int]:
    """Of each combination of indices that broadcast to a shape; and how many elements a row is apart from the next."""
    step = gcd(*(each.stride for each in addresses))
    made = low.scratch(DType.UINT32, shape)
    views = [each.indices.broadcast(shape) for each in addresses]
    for rows, width, (to, *parts) in sheets(low.k, [made, *views], WIDEST // 2):
        with low.k.room():
            words = Words(Lanes(low.k, rows, width), DType.INT32)
            total: Tile | None = None
            outside: list[Tile] = []
            for each, part in zip(addresses, parts, strict=True):
                index = words.load(load(low.k, part))
                if each.wraps:
                    below = words.with_number(Alu.LESS, index, 0)
                    index = words.two(Alu.ADD, index, words.with_number(Alu.MULTIPLY, below, each.size))
                if not each.sure:
                    outside.append(words.with_number(Alu.LESS, index, 0))
                    outside.append(words.with_number(Alu.GREATER_EQUAL, index, each.size))
                term = words.with_number(Alu.MULTIPLY, index, each.stride // step)
                total = term if total is None else words.two(Alu.ADD, total, term)
            assert total is not None  # something is addressed
            for asked in outside:
                words.lanes.choose(total, bits(asked), -1)
            low.k.copy(to.far(), bits(total))
    return made, step
