"""Kernel writer: loops, tiles in SBUF and PSUM, and instructions in program order.

Kernels are written for sequential execution; `schedule.waits` inserts the semaphore waits afterwards. For concurrency a
kernel only gives a tile several rotating buffers.
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
from nxpipe.emulator.isa.program import TILE_ROWS, Loop, Step

PARTITIONS: Final = TILE_ROWS
_ALIGNMENT: Final = 64  # bytes: the width of one SBUF access

Span = tuple[Affine | int, int]  # start and size


@dataclass(frozen=True)
class Block:
    """Memory of a tile: partitions that each hold the elements of `shape` contiguously (the free dimensions)."""

    memory: Memory
    dtype: DType
    partitions: int
    shape: tuple[int, ...]
    offset: Affine
    allocation: int = 0  # its number in `Kernel.allocations`

    @property
    def whole(self) -> Tile:
        return Tile(self.memory, self.dtype, 0, self.partitions, self.offset, contiguous(*self.shape), self.allocation)

    def cut(self, rows: int | Span, *spans: Span) -> Tile:
        """A part of the tile: partitions, and a span of each free axis; axes without a span are whole."""
        start, count = rows if isinstance(rows, tuple) else (0, rows)
        axes = contiguous(*self.shape)
        offset = self.offset
        for number, (begin, size) in enumerate(spans):
            offset = offset + affine(begin) * (axes[number].stride * self.dtype.itemsize)
            axes = (*axes[:number], Axis(size, axes[number].stride), *axes[number + 1 :])
        if not isinstance(start, int):
            raise TypeError("a start partition cannot depend on a loop")
        return Tile(self.memory, self.dtype, start, count, offset, axes, self.allocation)

    def row_stride(self, rows: int) -> int:
        """The stride in elements of `rows` rows on the last axis."""
        return rows


@dataclass(frozen=True)
class Allocation:
    """The bytes of a tile in each partition: `buffers` of `step` bytes each from `base` on, in rotation. Its content
    lives in one iteration of the innermost of `depth` loops; `outer` of them are around its kernel."""

    memory: Memory
    base: int
    step: int
    buffers: int
    depth: int
    outer: int = 0

    @property
    def nbytes(self) -> int:
        return self.step * self.buffers


@dataclass(frozen=True, kw_only=True)
class RunMajorBlock(Block):
    """Transposed rows [128, chunks, rows] in run-major layout: all chunks of a run of rows precede those of the next
    run. A run is contiguous, so that a single collective can exchange it."""

    rows: int

    def cut(self, rows: int | Span, *spans: Span) -> Tile:
        """A span of chunks of whole runs of rows."""
        (chunk, chunks), (row, count) = spans
        start = affine(row) * self.shape[0] + affine(chunk) * self.rows
        axes = (Axis(chunks, self.rows), Axis(count // self.rows, self.row_stride(self.rows)), Axis(self.rows, 1))
        tile = super().cut(rows)
        return replace(tile, offset=tile.offset + start * self.dtype.itemsize, axes=axes)

    def run(self, row: Affine | int, count: int) -> Tile:
        """All chunks of whole runs of rows, contiguous."""
        tile = self.whole
        start = affine(row) * (self.shape[0] * self.dtype.itemsize)
        return replace(tile, offset=tile.offset + start, axes=contiguous(self.shape[0] * count))

    def row_stride(self, rows: int) -> int:
        return rows * self.shape[0]


@dataclass(frozen=True, kw_only=True)
class TiledBlock(Block):
    """A part of a matrix [128, chunks, columns] in the order of `Buffer.tile`: each partition has tile after tile, each
    with its whole chunks. A last chunk of fewer than 128 rows follows, row-major."""

    tile: int
    whole_chunks: int

    def cut(self, rows: int | Span, *spans: Span) -> Tile:
        """A span of columns of one chunk: a whole tile, or any span if the block is no wider than a tile."""
        (chunk, _), (column, size) = spans
        if self.shape[1] > self.tile:
            return self.cut_tile(rows, chunk, (column, size), (0, size))
        return self.cut_tile(rows, chunk, (0, self.shape[1]), (column, size))

    def cut_tile(self, rows: int | Span, chunk: Affine | int, tile: Span, inside: Span) -> Tile:
        """A span of the columns of a tile, in one chunk."""
        if rows == PARTITIONS:
            start = affine(tile[0]) * self.whole_chunks + affine(chunk) * tile[1] + inside[0]
        else:
            start = affine(chunk) * self.shape[1] + tile[0] + inside[0]
        whole = super().cut(rows)
        return replace(whole, offset=whole.offset + start * self.dtype.itemsize, axes=contiguous(inside[1]))


class Kernel:
    """Emits instructions, each with `note`, the number of its place in the model. Allocates tiles."""

    def __init__(self, core: CoreSpec) -> None:
        self.core = core
        self.note = 0
        self._bodies: list[list[Step]] = [[]]
        self._counts: list[int] = []
        self._allocated = {Memory.SBUF: 0, Memory.PSUM: 0}
        self._next_queue = 0
        self.reserved = 0  # bytes per SBUF partition that the current kernel must leave free
        self.tilings: list[object] = []  # of the current kernel, for its record
        self.emitters: dict[int, object] = {}  # id(step): the owner that `attribute_to` was called with
        self.allocations: dict[int, Allocation] = {}  # by number, from 1 on
        self._outer_loops = 0  # loops around the current kernel
        self._owner: object = None

    @property
    def body(self) -> tuple[Step, ...]:
        return tuple(self._bodies[0])

    @contextmanager
    def loop(self, count: int) -> Iterator[Affine]:
        """Put the instructions emitted inside into a loop; yields its index. A single iteration needs no loop."""
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
        """Tile a size: a loop over full tiles of `step`, then the remainder; yields start and size. The body of the
        `for` statement is emitted at most twice, once for the loop and once for the remainder."""
        tiles, remainder = divmod(size, step)
        if tiles:
            with self.loop(tiles) as number:
                yield number * step, step
        if remainder:
            yield Affine(tiles * step), remainder

    def chunks(self, size: int) -> Iterator[tuple[Affine, int]]:
        """Index and size of each chunk of 128 elements; tiled like `spans`."""
        full, remainder = divmod(size, PARTITIONS)
        if full:
            with self.loop(full) as chunk:
                yield chunk, PARTITIONS
        if remainder:
            yield Affine(full), remainder

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Release the tiles allocated inside at the end."""
        allocated = dict(self._allocated)
        yield
        self._allocated = allocated

    @property
    def in_loop(self) -> bool:
        return bool(self._counts)

    @contextmanager
    def before_loops(self) -> Iterator[None]:
        """Put the instructions emitted inside before all loops around this place."""
        inner = self._bodies, self._counts
        self._bodies, self._counts = self._bodies[:1], []
        first = len(self._bodies[0])
        yield
        self.emitters |= {id(step): self._owner for step in self._bodies[0][first:]}
        self._bodies, self._counts = inner

    @contextmanager
    def attribute_to(self, owner: object, reserved: int = 0) -> Iterator[None]:
        """Attribute the steps emitted inside to an owner, whose tiles leave `reserved` bytes per SBUF partition
        free."""
        first = len(self._bodies[-1])
        self.reserved, self._outer_loops, self._owner = reserved, len(self._counts), owner
        yield
        self.reserved = 0
        self.emitters |= {id(step): owner for step in self._bodies[-1][first:]}

    def free_bytes(self, memory: Memory) -> int:
        """Free bytes per partition."""
        return self._limit(memory) - self._allocated[memory]

    def tile(self, dtype: DType, partitions: int, *shape: int, memory: Memory = Memory.SBUF, buffers: int = 1) -> Block:
        """Allocate a tile until the end of the innermost scope.

        With two buffers (double buffering), consecutive iterations of the innermost loop use alternate buffers, so that
        one is written while the other is read. More buffers rotate in the same way. Outside of the kernel's own loops
        one buffer suffices: `schedule_kernels` puts the tiles of consecutive kernels into different places."""
        if len(self._counts) <= self._outer_loops:
            buffers = 1
        size = prod(shape) * dtype.itemsize
        step = -(-size // self._unit(memory)) * self._unit(memory)
        if step * buffers > self.free_bytes(memory):
            tile = f"a tile of {partitions} x {list(shape)} {dtype}"
            memory_name = f"each partition of {memory.upper()}"
            raise OutOfMemory(tile, memory_name, step * buffers, self.free_bytes(memory), (), "use a smaller tile")
        offset = rotating_offset(self._iteration(), buffers, step) + self._allocated[memory]
        number, depth = len(self.allocations) + 1, len(self._counts)
        self.allocations[number] = Allocation(
            memory, self._allocated[memory], step, buffers, depth, min(depth, self._outer_loops)
        )
        self._allocated[memory] += step * buffers
        return Block(memory, dtype, partitions, shape, offset, number)

    def psum(self, partitions: int, *shape: int, buffers: int = 2) -> Block:
        """Allocate float32 matmul sums, aligned to a PSUM bank."""
        return self.tile(DType.FLOAT32, partitions, *shape, memory=Memory.PSUM, buffers=buffers)

    def emit(self, instruction: Instruction) -> None:
        self._bodies[-1].append(instruction.with_fields(note=self.note))

    def copy(self, dst: Place, src: Place) -> None:
        """Emit a DMA copy. Copies rotate over the queues, so that several run concurrently."""
        self.emit(DmaCopy(engine=self._queue(), dst=dst, src=src))

    def transpose(self, dst: Tile, src: Far) -> None:
        """Emit a DMA that transposes a matrix; NeuronCore v3 and later."""
        self.emit(DmaTranspose(engine=self._queue(), dst=dst, src=src))

    def _queue(self) -> Engine:
        queue = DMA_QUEUES[self._next_queue % len(DMA_QUEUES)]
        self._next_queue += 1
        return queue

    def _iteration(self) -> Affine:
        """The linear index of the innermost loop's iteration, over all enclosing loops."""
        linear = Affine()
        for depth, count in enumerate(self._counts):
            linear = linear * count + index(depth)
        return linear

    def _limit(self, memory: Memory) -> int:
        return self.core.sbuf_usable - self.reserved if memory is Memory.SBUF else self.core.psum

    def _unit(self, memory: Memory) -> int:
        return _ALIGNMENT if memory is Memory.SBUF else self.core.psum_bank
