"""The rules that an instruction breaks, seen alone; those that move data and multiply are here."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.faults import Breaches, Broken, Rule
from nxpipe.emulator.isa.instructions import (
    DMA_QUEUES,
    AllGather,
    AllReduce,
    DmaCopy,
    DmaTranspose,
    Engine,
    Instruction,
    Matmul,
    ReduceScatter,
    Transpose,
)
from nxpipe.emulator.isa.kinds import (
    ACROSS_RANKS,
    ENGINES,
    FULL,
    MULTIPLIED,
    TRANSPOSED,
)
from nxpipe.emulator.isa.lanes import LANE_RULES
from nxpipe.emulator.isa.operands import Far, Memory, Place, Tile
from nxpipe.emulator.isa.places import Room
from nxpipe.emulator.isa.shapes import operator, same_type, sized, typed, unequal
from nxpipe.emulator.isa.transfer import is_dense


def broken(instruction: Instruction, room: Room) -> Breaches:
    """The rules that an instruction breaks, seen alone: first by its places, then by what it is."""
    engines, engine = ENGINES[type(instruction)], instruction.engine
    if engines.get(engine, room.core.nki_gen + 1) > room.core.nki_gen:
        able = [name for name, since in engines.items() if since <= room.core.nki_gen]
        yield Broken(
            Rule.ENGINE,
            f"on {room.core.name}, {engine} does not carry out {instruction.name}",
            f"give it to {' or '.join(able)}" if able else "use another instruction",
        )
        return
    for name, place in instruction.places.items():
        yield from room.breaches(place, engine)
        if isinstance(place, Tile):
            yield from _reachable(name, place, engine)
    yield from _RULES[type(instruction)](instruction, room)


def _reachable(name: str, tile: Tile, engine: Engine) -> Breaches:
    in_psum = tile.memory is Memory.PSUM
    if in_psum and (engine in (Engine.GPSIMD, Engine.COLLECTIVE) or engine in DMA_QUEUES):
        yield Broken(Rule.MEMORY, f"{engine} does not reach {name} in PSUM", "copy it to SBUF first")
    if engine is Engine.TENSOR and in_psum != (name == "dst"):
        yield Broken(Rule.MEMORY, f"{name} of the tensor engine is in {tile.memory}", "it reads SBUF and writes PSUM")


def _copy(it: DmaCopy, room: Room) -> Breaches:
    if _length(it.dst) != _length(it.src):
        yield unequal(f"dst has {_length(it.dst)} elements, src {_length(it.src)}")
    if all(isinstance(place, Far) and place.rows for place in (it.dst, it.src)):
        yield Broken(Rule.SHAPE, "both sides go by row numbers", "copy through SBUF")


def _length(place: Place) -> int:
    return place.elements * place.partitions if isinstance(place, Tile) else place.elements


def _dma_transpose(it: DmaTranspose, room: Room) -> Breaches:
    yield from same_type("dst", it.dst, "src", it.src)
    if it.src.dtype.itemsize not in (2, 4):
        yield Broken(Rule.DTYPE, f"src is {it.src.dtype}", "use a type of 2 or 4 bytes")
    if len(it.src.axes) != 2 or it.src.rows:
        yield Broken(Rule.SHAPE, f"src has {len(it.src.axes)} axes", "transpose plain matrices")
    else:
        rows, columns = it.src.axes
        yield from sized("dst", it.dst, columns.size, rows.size)


def _matmul(it: Matmul, room: Room) -> Breaches:
    core = room.core
    rows, columns = it.stationary.elements, it.moving.elements
    most = core.max_moving_free_fp32
    if it.dst.dtype is DType.BFLOAT16 and core.max_moving_free_bf16:
        most = core.max_moving_free_bf16
    if rows > core.max_stationary_free or columns > most:
        yield Broken(
            Rule.SHAPE,
            f"{rows} columns stand and {columns} move",
            f"{core.name} takes {core.max_stationary_free} and {most}; split them",
        )
    if (it.stationary.start, it.stationary.partitions) != (it.moving.start, it.moving.partitions):
        yield Broken(
            Rule.SHAPE,
            f"stationary is in {it.stationary.partitions} partitions from {it.stationary.start} on, moving in "
            f"{it.moving.partitions} from {it.moving.start} on",
            "put them into the same ones",
        )
    yield from sized("dst", it.dst, rows, columns)
    yield from typed("dst", it.dst, tuple(map(DType, core.psum_dtypes)))
    yield from typed("stationary", it.stationary, MULTIPLIED)
    yield from typed("moving", it.moving, MULTIPLIED)
    yield from _paired(it.stationary.dtype, it.moving.dtype)
    yield from room.bank(it.dst)
    yield from room.follows(it.accumulate)


def _paired(one: DType, other: DType) -> Breaches:
    if (one in FULL) != (other in FULL) or {one, other} == {DType.FLOAT8_E4M3, DType.FLOAT8_E4M3FN}:
        yield Broken(Rule.DTYPE, f"{one} is multiplied by {other}", "convert one of them first")


def _transpose(it: Transpose, room: Room) -> Breaches:
    most = TRANSPOSED[it.engine]
    if it.src.partitions > most or it.src.elements > most:
        yield Broken(
            Rule.SHAPE,
            f"src is {it.src.partitions} x {it.src.elements}",
            f"{it.engine} takes {most} x {most}",
        )
    yield from sized("dst", it.dst, it.src.elements, it.src.partitions)
    if it.engine is Engine.TENSOR:
        yield from same_type("dst", it.dst, "src", it.src)
        wide = tuple(dtype for dtype in MULTIPLIED if dtype.itemsize > 1)
        yield from typed("src", it.src, MULTIPLIED if room.core.nki_gen < 3 else wide)
        yield from room.bank(it.dst)


def _all_reduce(it: AllReduce, room: Room) -> Breaches:
    yield from _exchanged(("dst", it.dst), ("src", it.src), 1)
    yield from operator("op", it.op, ACROSS_RANKS)


def _reduce_scatter(it: ReduceScatter, room: Room) -> Breaches:
    yield from _exchanged(("src", it.src), ("dst", it.dst), room.ranks)
    yield from operator("op", it.op, ACROSS_RANKS)


def _all_gather(it: AllGather, room: Room) -> Breaches:
    yield from _exchanged(("dst", it.dst), ("src", it.src), room.ranks)


def _exchanged(long: tuple[str, Place], short: tuple[str, Place], times: int) -> Breaches:
    """Ranks' parts lie one behind the other: in HBM, or in each partition."""
    yield from same_type("dst", long[1], "src", short[1])
    sizes = [_length(place) for _, place in (long, short)]
    if sizes[0] != sizes[1] * times:
        wanted = f"make {long[0]} {times} times as long"
        yield Broken(Rule.SHAPE, f"{long[0]} has {sizes[0]} elements, {short[0]} {sizes[1]}", wanted)
    shapes = {(type(place), place.partitions if isinstance(place, Tile) else 1) for _, place in (long, short)}
    if len(shapes) > 1:
        yield unequal("dst and src are not alike")
    for name, place in (long, short):
        if (isinstance(place, Far) and place.rows) or not is_dense(place.axes):
            yield Broken(Rule.SHAPE, f"{name} is not contiguous", "exchange what lies one behind the other")


_RULES: Final[Mapping[type[Instruction], Callable[[Any, Room], Breaches]]] = {
    **LANE_RULES,
    DmaCopy: _copy,
    DmaTranspose: _dma_transpose,
    Matmul: _matmul,
    Transpose: _transpose,
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    AllGather: _all_gather,
}
