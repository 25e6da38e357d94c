"""Kernel writer: loops, tiles in SBUF and PSUM, and instructions in program order.

A kernel is written as if nothing ran concurrently; `schedule.waits` synchronises the engines afterwards. All that a
kernel does for concurrency is to give a tile several buffers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from nxpipe.emulator.errors import OutOfMemory
from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, affine, index, rotating_offset
from nxpipe.emulator.isa.dma import DmaCopy, DmaTranspose
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile, contiguous
from nxpipe.emulator.isa.program import Loop, Step

PARTITIONS: Final = 128
_ALIGNMENT: Final = 64  # bytes: what one access moves at once

Span = tuple[Affine | int, int]  # where it starts, and how many


@dataclass(frozen=True)
class Block:
    """Space for a tile: partitions, and in each the elements of `shape`, contiguous."""

    memory: Memory
    dtype: DType
    partitions: int
    shape: tuple[int, ...]
    offset: Affine

    @property
    def whole(self) -> Tile:
        return Tile(self.memory, self.dtype, 0, self.partitions, self.offset, contiguous(*self.shape))

    def cut(self, rows: int | Span, *spans: Span) -> Tile:
        """A part of the tile: partitions, and a span of each axis; axes without a span are taken whole."""
        start, count = rows if isinstance(rows, tuple) else (0, rows)
        axes = contiguous(*self.shape)
        offset = self.offset
        for number, (begin, size) in enumerate(spans):
            offset = offset + affine(begin) * (axes[number].stride * self.dtype.itemsize)
            axes = (*axes[:number], Axis(size, axes[number].stride), *axes[number + 1 :])
        if not isinstance(start, int):
            raise TypeError("a start partition cannot depend on a loop")
        return Tile(self.memory, self.dtype, start, count, offset, axes)

    def apart(self, rows: int) -> int:
        """Distance in elements between two rows so many apart on the last axis."""
        return rows


@dataclass(frozen=True)
class RunMajorBlock(Block):
    """Transposed rows [128, chunks, rows] with all chunks of a run of rows before those of the next run, so that a run
    is contiguous and can be exchanged at once."""

    rows: int

    def cut(self, rows: int | Span, *spans: Span) -> Tile:
        """Some chunks of some whole runs of rows."""
        (chunk, some), (row, count) = spans
        start = affine(row) * self.shape[0] + affine(chunk) * self.rows
        axes = (Axis(some, self.rows), Axis(count // self.rows, self.apart(self.rows)), Axis(self.rows, 1))
        tile = super().cut(rows)
        return replace(tile, offset=tile.offset + start * self.dtype.itemsize, axes=axes)

    def run(self, row: Affine | int, count: int) -> Tile:
        """All chunks of some whole runs of rows, contiguous."""
        tile = self.whole
        start = affine(row) * (self.shape[0] * self.dtype.itemsize)
        return replace(tile, offset=tile.offset + start, axes=contiguous(self.shape[0] * count))

    def apart(self, rows: int) -> int:
        return rows * self.shape[0]


class Kernel:
    """Emits instructions. `note` is the number of the place in the model that each of them carries."""

    def __init__(self, core: CoreSpec) -> None:
        self.core = core
        self.note = 0
        self._bodies: list[list[Step]] = [[]]
        self._counts: list[int] = []
        self._taken = {Memory.SBUF: 0, Memory.PSUM: 0}
        self.most = {Memory.SBUF: 0, Memory.PSUM: 0}
        self._next_queue = 0
        self.withheld = 0  # bytes of each partition of SBUF that are kept for others
        self.tilings: list[object] = []  # that the kernel being emitted has chosen, for its record
        self.makers: dict[int, object] = {}  # of the steps of this and enclosing bodies, by identity, who wrote each

    @property
    def body(self) -> tuple[Step, ...]:
        return tuple(self._bodies[0])

    @contextmanager
    def loop(self, count: int) -> Iterator[Affine]:
        """Emit a loop around what is emitted inside; yields its index. A single iteration needs no loop."""
        if count == 1:
            yield Affine()
            return
        self._counts.append(count)
        self._bodies.append([])
        yield index(len(self._counts) - 1)
        body = self._bodies.pop()
        self._counts.pop()
        if body:
            self._bodies[-1].append(Loop(count, tuple(body)))

    def spans(self, size: int, step: int) -> Iterator[tuple[Affine, int]]:
        """Start and size of each piece: full pieces in a loop, then the remainder. Use it as the head of a `for`, whose
        body is then emitted once for each of the two."""
        full, rest = divmod(size, step)
        if full:
            with self.loop(full) as number:
                yield number * step, step
        if rest:
            yield Affine(full * step), rest

    def chunks(self, size: int) -> Iterator[tuple[Affine, int]]:
        """Number and size of each piece of 128 elements."""
        full, rest = divmod(size, PARTITIONS)
        if full:
            with self.loop(full) as chunk:
                yield chunk, PARTITIONS
        if rest:
            yield Affine(full), rest

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Tiles allocated inside are released at the end."""
        taken = dict(self._taken)
        yield
        self._taken = taken

    @contextmanager
    def made_for(self, maker: object, withheld: int = 0) -> Iterator[None]:
        """Attribute the steps emitted inside to a maker, whose tiles leave `withheld` bytes of each partition free."""
        first = len(self._bodies[-1])
        self.withheld = withheld
        yield
        self.withheld = 0
        self.makers |= {id(step): maker for step in self._bodies[-1][first:]}

    def left(self, memory: Memory) -> int:
        """Free bytes of each partition."""
        return self._limit(memory) - self._taken[memory]

    def tile(self, dtype: DType, partitions: int, *shape: int, memory: Memory = Memory.SBUF, buffers: int = 1) -> Block:
        """Allocate a tile until the end of the innermost scope. With two buffers, consecutive iterations use different
        ones, so that one is written while the other is read: double buffering."""
        size = prod(shape) * dtype.itemsize
        step = -(-size // self._unit(memory)) * self._unit(memory)
        if step * buffers > self.left(memory):
            what = f"a tile of {partitions} x {list(shape)} {dtype}"
            where = f"each partition of {memory.upper()}"
            raise OutOfMemory(what, where, step * buffers, self.left(memory), (), "make it smaller")
        offset = rotating_offset(self._iteration(), buffers, step) + self._taken[memory]
        self._taken[memory] += step * buffers
        self.most[memory] = max(self.most[memory], self._taken[memory])
        return Block(memory, dtype, partitions, shape, offset)

    def psum(self, partitions: int, *shape: int, buffers: int = 2) -> Block:
        """Allocate float32 sums of matmuls, from the start of a PSUM bank on."""
        return self.tile(DType.FLOAT32, partitions, *shape, memory=Memory.PSUM, buffers=buffers)

    def emit(self, instruction: Instruction) -> None:
        self._bodies[-1].append(replace(instruction, note=self.note))

    def copy(self, dst: Place, src: Place) -> None:
        """Emit a DMA copy. Copies rotate over the queues, so that several are in flight."""
        self.emit(DmaCopy(engine=self._queue(), dst=dst, src=src))

    def transpose(self, dst: Tile, src: Far) -> None:
        """Emit a DMA that swaps the two axes of a matrix; from v3 on."""
        self.emit(DmaTranspose(engine=self._queue(), dst=dst, src=src))

    def _queue(self) -> Engine:
        queue = DMA_QUEUES[self._next_queue % len(DMA_QUEUES)]
        self._next_queue += 1
        return queue

    def _iteration(self) -> Affine:
        """The number of iterations of the innermost loop so far, counted through all loops around it."""
        linear = Affine()
        for depth, count in enumerate(self._counts):
            linear = linear * count + index(depth)
        return linear

    def _limit(self, memory: Memory) -> int:
        return self.core.sbuf_usable - self.withheld if memory is Memory.SBUF else self.core.psum

    def _unit(self, memory: Memory) -> int:
        return _ALIGNMENT if memory is Memory.SBUF else self.core.psum_bank
