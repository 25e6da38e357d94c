"""Hand-written programs: tiles with any strides, and the simplest waits."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.schedule.waits import eliminate_redundant_waits, insert_waits

FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)
NARROW = (*FLOATS, DType.INT8, DType.UINT8, DType.INT16, DType.UINT16)


@dataclass(frozen=True)
class Layout:
    """The layout of a tile's elements: axis order, the gap after each axis, and reversed axes."""

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    backwards: tuple[bool, ...]

    def tile(self, memory: Memory, dtype: DType, start: int, shape: Sequence[int], low: int) -> Tile:
        """A tile that starts at byte `low`."""
        sizes, strides, step = shape[1:], [0] * (len(shape) - 1), 1
        for axis in reversed(self.order):
            strides[axis] = step
            step = step * sizes[axis] + self.gaps[axis]
        offset = low
        for axis, back in enumerate(self.backwards):
            if back:
                offset += (sizes[axis] - 1) * strides[axis] * dtype.itemsize
                strides[axis] *= -1
        axes = tuple(Axis(size, stride) for size, stride in zip(sizes, strides, strict=True))
        return Tile(memory, dtype, start, shape[0], Affine(offset), axes)


def layouts(axes: int) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        st.permutations(range(axes)).map(tuple),
        st.tuples(*[st.integers(0, 3)] * axes),
        st.tuples(*[st.booleans()] * axes),
    )


ROOM = 1 << 11  # bytes of a partition for each operand: a PSUM bank


def in_order(body: Sequence[Step]) -> tuple[Step, ...]:
    """Let each instruction wait for all earlier ones."""
    return _ordered(body, 0, {})


def _ordered(body: Sequence[Step], depth: int, before: Mapping[Engine, Affine]) -> tuple[Step, ...]:
    known, steps = dict(before), list[Step]()
    for step in body:
        if isinstance(step, Loop):
            each = carried_out(step.body)
            inside = {engine: known.get(engine, Affine()) + index(depth) * count for engine, count in each.items()}
            steps.append(Loop(step.count, _ordered(step.body, depth + 1, {**known, **inside})))
            known |= {engine: known.get(engine, Affine()) + count * step.count for engine, count in each.items()}
        else:
            waits = (Wait(engine, done) for engine, done in known.items() if engine is not step.engine)
            steps.append(step.after(*waits))
            known[step.engine] = known.get(step.engine, Affine()) + 1
    return tuple(steps)


def carried_out(body: Sequence[Step]) -> Counter[Engine]:
    found = Counter[Engine]()
    for step in body:
        if isinstance(step, Loop):
            found.update({engine: count * step.count for engine, count in carried_out(step.body).items()})
        else:
            found[step.engine] += 1
    return found


def table(*buffers: tuple[Role, str, DType, tuple[int, ...]]) -> tuple[Buffer, ...]:
    """Consecutive offsets."""
    laid, address = list[Buffer](), 0
    for role, name, dtype, shape in buffers:
        laid.append(Buffer(role, (name,), dtype, shape, address=address))
        address += -(-laid[-1].nbytes // 64) * 64
    return tuple(laid)


@dataclass
class Bench:
    """One instruction between copies in and out. Operands are in SBUF, or in PSUM by a copy or product."""

    core: str = "v2"
    memories: Mapping[str, Memory] | None = None
    layouts: Mapping[str, Layout] | None = None
    order: str = "hostile"

    def __call__(
        self,
        make: Callable[..., Instruction],
        given: Mapping[str, tuple[Array, DType]],
        dst: tuple[DType, tuple[int, ...]],
        more: Mapping[str, tuple[DType, tuple[int, ...]]] | None = None,
        start: Array | None = None,
    ) -> dict[str, Array]:
        """`make(**tiles)` is the instruction, `given` are its operands' values in their types' own numpy types; `dst`
        and `more` are its results, `start` what `dst` holds before."""
        results = {"dst": dst, **(more or {})}
        shapes = {**{name: (dtype, held.shape) for name, (held, dtype) in given.items()}, **results}
        tiles = {name: self._tile(number, name, *shape) for number, (name, shape) in enumerate(shapes.items())}
        inputs = {**given, **({} if start is None else {"start": (start, dst[0])})}
        buffers = table(
            *((Role.INPUT, name, dtype, held.shape) for name, (held, dtype) in inputs.items()),
            *((Role.OUTPUT, name, dtype, shape) for name, (dtype, shape) in results.items()),
        )
        far = {
            buffer.names[0]: Far(at, buffer.dtype, Affine(), contiguous(*buffer.shape))
            for at, buffer in enumerate(buffers)
        }
        body: list[Step] = []
        for name in inputs:
            body += _loaded(tiles["dst" if name == "start" else name], far[name])
        body.append(make(**tiles))
        for name in results:
            body += _stored(far[name], tiles[name])
        machine = Machine(Program(self.core, 1, buffers, in_order(body)), order=self.order)
        for name, (held, _) in inputs.items():
            machine.write(name, held)
        machine.execute()
        return {name: machine.read(name) for name in results}

    def _tile(self, position: int, name: str, dtype: DType, shape: tuple[int, ...]) -> Tile:
        plain = Layout(tuple(range(len(shape) - 1)), (0,) * (len(shape) - 1), (False,) * (len(shape) - 1))
        layout = (self.layouts or {}).get(name, plain)
        memory = (self.memories or {}).get(name, Memory.SBUF)
        return layout.tile(memory, dtype, 0, shape, position * ROOM)


def _loaded(tile: Tile, source: Far) -> list[Step]:
    if tile.memory is Memory.SBUF:
        return [DmaCopy(engine=Engine.DMA0, dst=tile, src=source)]
    passing = _beside(tile)
    return [
        DmaCopy(engine=Engine.DMA0, dst=passing, src=source),
        TensorCopy(engine=Engine.VECTOR, dst=tile, src=passing),
    ]


def _stored(home: Far, tile: Tile) -> list[Step]:
    if tile.memory is Memory.SBUF:
        return [DmaCopy(engine=Engine.DMA1, dst=home, src=tile)]
    passing = _beside(tile)
    return [
        TensorCopy(engine=Engine.VECTOR, dst=passing, src=tile),
        DmaCopy(engine=Engine.DMA1, dst=home, src=passing),
    ]


def _beside(tile: Tile) -> Tile:
    sizes = [axis.size for axis in tile.axes]
    return replace(tile, memory=Memory.SBUF, offset=Affine(8 * ROOM), axes=contiguous(*sizes))


def values(random: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Small random elements in the type's own numpy type, without overflow."""
    if dtype.is_float:
        return as_stored(random.normal(0, 2, shape), dtype).astype(dtype.stored)
    limits = np.iinfo(dtype.value)
    return random.integers(max(limits.min, -100), min(limits.max, 100), shape, dtype.stored, endpoint=True)


def as_stored(results: Array, dtype: DType) -> Array:
    """Floats rounded to nearest even by the type's own conversion; integers rounded and saturated."""
    if dtype is DType.TFLOAT32:  # numpy has none: ten bits of the mantissa, as float16 has
        mantissa, exponent = np.frexp(results.astype(np.float32))
        return np.asarray(np.ldexp(mantissa.astype(np.float16).astype(np.float32), exponent))
    if dtype.is_float:
        return np.asarray(results.astype(np.float32).astype(dtype.stored).astype(np.float32))
    if results.dtype.kind in "iu":
        return np.asarray(results.astype(dtype.stored))
    limits = np.iinfo(dtype.value)
    whole = np.rint(np.nan_to_num(results.astype(np.float64), posinf=1e300, neginf=-1e300))
    held = [min(max(int(entry), limits.min), limits.max) for entry in whole.flat]
    return np.asarray(held, dtype.stored).reshape(results.shape)


def wide(numbers: Array) -> Array:
    return np.asarray(numbers.astype(np.float32))


def with_waits(program: Program) -> Program:
    """The program with the back end's waits."""
    return eliminate_redundant_waits(insert_waits(program))
