"""Random executables, correct in form but not necessarily legal."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from nxpipe.emulator.executable.code import INSTRUCTIONS, kind_of
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.passes.shard import Sharding

WHOLE = st.integers(-(2**40), 2**40)
COUNT = st.integers(0, 2**40)
NOTES = ("", "model.layers.0", "model.layers.1 at modeling_llama.py:12")
BUFFERS = 3
DTYPES = st.sampled_from(DType)


@st.composite
def sums(draw: Any, loops: int) -> Affine:
    depths = draw(st.lists(st.integers(0, loops - 1), unique=True, max_size=3)) if loops else []
    coefficients = WHOLE.filter(bool)
    return Affine(draw(WHOLE), tuple((depth, draw(coefficients)) for depth in sorted(depths)))


@st.composite
def affines(draw: Any, loops: int) -> Affine:
    plain = draw(sums(loops))
    turns = st.builds(RotatingOffset, WHOLE.filter(bool), st.integers(2, 9), sums(loops))
    return Affine(plain.base, plain.terms, tuple(draw(st.lists(turns, max_size=2))))


def axes() -> st.SearchStrategy[tuple[Axis, ...]]:
    return st.lists(st.builds(Axis, COUNT, WHOLE), max_size=4).map(tuple)


def tiles(loops: int) -> st.SearchStrategy[Tile]:
    return st.builds(Tile, st.sampled_from(Memory), DTYPES, COUNT, COUNT, affines(loops), axes())


def fars(loops: int) -> st.SearchStrategy[Far]:
    buffer = st.integers(0, BUFFERS - 1)
    return st.builds(Far, buffer, DTYPES, affines(loops), axes(), st.none() | tiles(loops))


def values(form: str, loops: int) -> st.SearchStrategy[Any]:
    of: Mapping[str, Callable[[], st.SearchStrategy[Any]]] = {
        "affine": lambda: affines(loops),
        "tile": lambda: tiles(loops),
        "far": lambda: fars(loops),
        "place": lambda: tiles(loops) | fars(loops),
        "alu": lambda: st.sampled_from(Alu),
        "function": lambda: st.sampled_from(Function),
        "flag": st.booleans,
        "real": lambda: st.floats(allow_nan=False),
        "whole": lambda: WHOLE,
        "wholes": lambda: st.lists(WHOLE, max_size=4).map(tuple),
    }
    if form.endswith("?"):
        return st.none() | values(form.removesuffix("?"), loops)
    first, _, second = form.partition("|")
    return of[first]() | values(second, loops) if second else of[first]()


@st.composite
def instructions(draw: Any, loops: int) -> Instruction:
    kind = kind_of(draw(st.sampled_from(list(INSTRUCTIONS.values()))))
    return kind.record(
        engine=draw(st.sampled_from(Engine)),
        waits=tuple(draw(st.lists(st.builds(Wait, st.sampled_from(Engine), affines(loops)), max_size=3))),
        note=draw(st.integers(0, len(NOTES) - 1)),
        **{name: draw(values(form, loops)) for name, form in kind.fields},
    )


@st.composite
def bodies(draw: Any, loops: int = 0) -> tuple[Step, ...]:
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, 3))):
        if loops < 3 and draw(st.booleans()):
            steps.append(Loop(draw(st.integers(1, 1000)), draw(bodies(loops + 1))))
        else:
            step = draw(instructions(loops))
            steps += [step] * draw(st.integers(1, 2))
    return tuple(steps)


@st.composite
def executables(draw: Any) -> Executable:
    """Two ranks, each with half of a weight's columns and half of a state's rows, of which one may be padding."""
    table = draw(st.binary(max_size=40))
    digest = hashlib.sha256(table).hexdigest()
    dtype = draw(DTYPES)
    rows, columns = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    held = draw(st.integers(rows + 1, 2 * rows))
    buffers = (
        Buffer(Role.INPUT, ("ids",), dtype.on_device, (rows, columns), (), draw(COUNT)),
        Buffer(
            Role.PARAMETER,
            ("a.weight", "b.weight"),
            DType.BFLOAT16,
            (columns, rows),
            (1, 0),
            draw(COUNT),
            draw(st.integers(0, 512)),
        ),
        Buffer(Role.STATE, ("cache",), DType.FLOAT32, (rows, columns)),
        Buffer(Role.CONSTANT, (digest,), DType.UINT8, (len(table),)),
    )
    ports = (
        Port("ids", Role.INPUT, TensorType((rows, columns), dtype), draw(st.sampled_from([(), ("batch", "")]))),
        Port("cache", Role.STATE, TensorType((held, columns), DType.FLOAT32)),
    )
    divisions = {1: Sharding(1, (2 * columns,), (2,)), 2: Sharding(0, (2 * rows,), (2,))}
    if held < 2 * rows:
        divisions[2] = Sharding(0, (held,), (1,), (1,), (rows,))
    constants = {digest: table} if draw(st.booleans()) else {}
    return Executable(Program("v3", 2, buffers, draw(bodies()), NOTES, constants), ports, divisions)
