"""Programs for tests of the instruction set: one plain, legal instruction of each kind, and random ones."""

from dataclasses import MISSING, fields, replace
from typing import Any

from hypothesis import strategies as st

from nxpipe.emulator.executable.code import INSTRUCTIONS
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.scalar import Function

FLOAT = DType.FLOAT32
STEP = 16 * 1024  # bytes between the operands of one instruction


def tile(
    lanes: int,
    *sizes: int,
    slot: int = 0,
    dtype: DType = FLOAT,
    memory: Memory = Memory.SBUF,
    start: int = 0,
) -> Tile:
    return Tile(memory, dtype, start, lanes, Affine(slot * STEP), contiguous(*sizes))


def sums(lanes: int, size: int, dtype: DType = FLOAT) -> Tile:
    return tile(lanes, size, dtype=dtype, memory=Memory.PSUM)


def far(*sizes: int, buffer: int = 0, dtype: DType = FLOAT, rows: Tile | None = None) -> Far:
    return Far(buffer, dtype, Affine(), contiguous(*sizes), rows)


def plain(name: str, engine: Engine, lanes: int = 128, size: int = 240) -> Instruction:
    """An instruction that is legal on each generation with its engine; in float32 and SBUF where possible."""
    dst, one, two = (tile(lanes, size, slot=slot) for slot in range(3))
    eight, column = tile(lanes, 8, slot=3), tile(lanes, 1, slot=3)
    where = {"dst": dst, "src": one}
    both = {"dst": dst, "left": one, "right": two}
    places: dict[str, dict[str, object]] = {
        "dma_copy": {"dst": dst, "src": far(lanes, size)},
        "dma_transpose": {"dst": dst, "src": far(size, lanes)},
        "nc_matmul": {"dst": sums(64, size), "stationary": tile(lanes, 64, slot=1), "moving": two},
        "nc_transpose": _transposed(engine, lanes, size),
        "activation": {**where, "function": Function.GELU, "bias": column},
        "tensor_tensor": {**both, "op": Alu.ADD},
        "tensor_scalar": {**where, "op0": Alu.RSQRT if engine is Engine.GPSIMD else Alu.ADD, "operand0": 1.0},
        "scalar_tensor_tensor": {**where, "op0": Alu.ADD, "operand0": column, "op1": Alu.ADD, "right": two},
        "tensor_reduce": {**where, "dst": tile(lanes, 1), "op": Alu.ADD},
        "tensor_copy_predicated": {**where, "predicate": tile(lanes, size, slot=2, dtype=DType.UINT8)},
        "tensor_tensor_scan": {**both, "initial": 0.0, "op0": Alu.MULTIPLY, "op1": Alu.ADD},
        "memset": {"dst": dst, "value": 1.5},
        "bn_stats": {**where, "dst": tile(lanes, 6)},
        "bn_aggr": {**where, "dst": tile(lanes, 2)},
        "max8": {**where, "dst": tile(lanes, 8)},
        "nc_find_index8": {**where, "dst": tile(lanes, 8, dtype=DType.UINT32), "values": eight},
        "nc_match_replace8": {**where, "values": eight, "number": -1.0},
        "iota": {"dst": dst, "start": Affine(), "by_partition": 1, "steps": (1,)},
        "affine_select": {
            **where,
            "start": Affine(),
            "by_partition": 1,
            "steps": (-1,),
            "compare": Alu.GREATER_EQUAL,
            "otherwise": -1e30,
        },
        "nc_n_gather": {**where, "indices": tile(lanes, size, slot=2, dtype=DType.UINT32)},
        "tensor_partition_reduce": {**where, "dst": tile(1, size), "op": Alu.MAXIMUM},
        "all_reduce": {"dst": far(size, buffer=1), "src": far(size)},
        "reduce_scatter": {"dst": far(size, buffer=1), "src": far(2, size)},
        "all_gather": {"dst": far(2, size, buffer=1), "src": far(size)},
    }
    return INSTRUCTIONS[name](engine=engine, **places.get(name, where))


def changed(instruction: Instruction, **changes: Any) -> Any:
    """`dataclasses.replace` without type checks, for instructions of a known kind."""
    return replace(instruction, **changes)


def _transposed(engine: Engine, lanes: int, size: int) -> dict[str, object]:
    most = 128 if engine is Engine.TENSOR else 32
    lanes, size = min(lanes, most), min(size, most)
    dst = sums(size, lanes) if engine is Engine.TENSOR else tile(size, lanes)
    return {"dst": dst, "src": tile(lanes, size, slot=1)}


def around(*body: Step, core: str = "v2", ranks: int = 2) -> Program:
    """A program with these steps and two large buffers."""
    buffers = (
        Buffer(Role.INPUT, ("x",), FLOAT, (128, 4096)),
        Buffer(Role.OUTPUT, ("y",), FLOAT, (128, 4096), address=2**21),
    )
    return Program(core=core, ranks=ranks, buffers=buffers, body=body)


# Any instruction that can be represented, legal or not.

NUMBERS = st.integers(-(10**6), 10**6)
FLOATS = st.floats(allow_nan=False)
TERMS = st.dictionaries(st.integers(0, 4), NUMBERS.filter(bool), max_size=3)


def _sorted(terms: dict[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(terms.items()))


PLAIN_AFFINES = st.builds(Affine, NUMBERS, TERMS.map(_sorted))
TURNS = st.builds(RotatingOffset, NUMBERS, st.integers(1, 9), PLAIN_AFFINES)
AFFINES = st.builds(Affine, NUMBERS, TERMS.map(_sorted), st.lists(TURNS, max_size=2).map(tuple))
DTYPES = st.sampled_from(DType)
DENSE = st.lists(st.integers(1, 300), max_size=4).map(lambda sizes: contiguous(*sizes))
AXES = DENSE | st.lists(st.builds(Axis, NUMBERS, NUMBERS), max_size=4).map(tuple)
TILES = st.builds(Tile, st.sampled_from(Memory), DTYPES, NUMBERS, NUMBERS, AFFINES, AXES)
STRINGS = st.text(max_size=12) | st.sampled_from(["sbuf", "x", "layers.0.up", 'a "b" \\', "", "#", "at 1"])
NAMES = st.lists(STRINGS, max_size=3) | st.builds(
    lambda first, step, count: [f"layers.{first + step * turn}.up" for turn in range(count)],
    st.integers(0, 5),
    st.integers(1, 3),
    st.integers(1, 40),
)
BUFFERS = st.builds(
    Buffer,
    st.sampled_from(Role),
    NAMES.map(tuple),
    DTYPES,
    st.lists(st.integers(0, 5000), max_size=4).map(tuple),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.integers(0, 10**12),
)


def fars(buffers: int) -> st.SearchStrategy[Far]:
    return st.builds(Far, st.integers(0, buffers - 1), DTYPES, AFFINES, AXES, st.none() | TILES)


def values(kind: Any, buffers: int) -> st.SearchStrategy[Any]:
    """Any value of an operand of this type."""
    known: dict[Any, st.SearchStrategy[Any]] = {
        Place: TILES | fars(buffers),
        Far: fars(buffers),
        Tile: TILES,
        Tile | None: st.none() | TILES,
        float: FLOATS,
        float | Tile: FLOATS | TILES,
        int: NUMBERS,
        tuple[int, ...]: st.lists(NUMBERS, max_size=4).map(tuple),
        Affine: AFFINES,
        bool: st.booleans(),
        Alu: st.sampled_from(Alu),
        Alu | None: st.none() | st.sampled_from(Alu),
        Function: st.sampled_from(Function),
    }
    return known[kind]


@st.composite
def instructions(draw: st.DrawFn, buffers: int, name: str | None = None) -> Instruction:
    kind = INSTRUCTIONS[name or draw(st.sampled_from(sorted(INSTRUCTIONS)))]
    waits = draw(st.lists(st.builds(Wait, st.sampled_from(Engine), AFFINES), max_size=2))
    given = {
        field.name: draw(values(field.type, buffers))
        for field in fields(kind)
        if field.name not in ("engine", "waits", "note") and (field.default is MISSING or draw(st.booleans()))
    }
    return kind(engine=draw(st.sampled_from(Engine)), waits=tuple(waits), note=draw(st.integers(0, 2)), **given)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    buffers = draw(st.lists(BUFFERS, min_size=1, max_size=4))
    step: st.SearchStrategy[Step] = instructions(len(buffers))
    loops = st.recursive(
        step,
        lambda inner: st.builds(Loop, st.integers(0, 9), st.lists(inner, max_size=3).map(tuple)),
        max_leaves=4,
    )
    return Program(
        core=draw(st.sampled_from(["v2", "v3", "v4"])),
        ranks=draw(st.integers(1, 64)),
        buffers=tuple(buffers),
        body=tuple(draw(st.lists(loops, max_size=3))),
        notes=draw(st.just(("",)) | st.lists(STRINGS, max_size=3).map(tuple)),
        constants=draw(st.dictionaries(STRINGS, st.binary(max_size=150), max_size=2)),
    )


def inside(*counts: int, body: tuple[Step, ...]) -> Step:
    """The body in loops with so many iterations, outermost first."""
    for count in reversed(counts):
        body = (Loop(count, body),)
    (loop,) = body
    return loop
