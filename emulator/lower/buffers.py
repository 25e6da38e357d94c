"""The table of what lies in HBM, as a program is written; addresses come last."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.program import Buffer, Lifetime, Role, Step, lifetimes
from nxpipe.emulator.lower.view import View, whole
from nxpipe.emulator.numerics import Array

_ALIGNMENT: Final = 4096  # bytes: a DMA packet


def on_device(dtype: DType) -> DType:
    return dtype.on_device


def narrowed(table: Array, dtype: DType) -> Array:
    """A table as the device holds it: the limits of 64 bits, which stand for no limit, become those of 32."""
    if dtype not in (DType.INT64, DType.UINT64):
        return table
    limits = np.iinfo(on_device(dtype).stored)
    return np.clip(table, limits.min, limits.max)


class Buffers:
    def __init__(self) -> None:
        self._table: list[Buffer] = []

    def add(
        self, role: Role, names: Sequence[str], dtype: DType, shape: tuple[int, ...], order: tuple[int, ...] = ()
    ) -> View:
        """Room for tensors of one shape; the view is of the first."""
        self._table.append(Buffer(role, tuple(names), on_device(dtype), shape, order))
        return whole(len(self._table) - 1, on_device(dtype), shape)

    def named(self, role: Role) -> list[Buffer]:
        return [buffer for buffer in self._table if buffer.role is role]

    @property
    def table(self) -> tuple[Buffer, ...]:
        return tuple(self._table)


def placed(table: Sequence[Buffer], body: Sequence[Step]) -> tuple[Buffer, ...]:
    """With addresses: what must stay has room of its own; scratch shares it with scratch that is needed at other
    times."""
    lived = lifetimes(body)
    found: dict[int, Buffer] = {}
    end = 0
    for number, buffer in enumerate(table):
        if buffer.role is not Role.SCRATCH:
            found[number] = replace(buffer, address=end)
            end += _aligned(buffer.nbytes)
    scratch = [number for number, buffer in enumerate(table) if buffer.role is Role.SCRATCH]
    taken: list[tuple[Lifetime, int, int]] = []
    for number in sorted(scratch, key=lambda number: (-table[number].nbytes, number)):
        size, life = _aligned(table[number].nbytes), lived.get(number, Lifetime(0, 0))
        address = _first_fit(end, size, [(at, to) for other, at, to in taken if other.meets(life)])
        taken.append((life, address, address + size))
        found[number] = replace(table[number], address=address)
    return tuple(found[number] for number in range(len(table)))


def _first_fit(start: int, size: int, taken: Iterable[tuple[int, int]]) -> int:
    at = start
    for low, high in sorted(taken):
        if at + size <= low:
            break
        at = max(at, high)
    return at


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
