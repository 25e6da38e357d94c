"""Schedule of kernels: copies composed away, loops pipelined, tiles placed, without a change of any result."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Loop, Program, Role, Step, instructions
from nxpipe.emulator.isa.vector import TensorCopy
from nxpipe.emulator.lower import backend, lower
from nxpipe.emulator.lower.backend import BACKEND, run_backend
from nxpipe.emulator.lower.copy_elimination import _Mapping
from nxpipe.emulator.lower.kernel import Allocation
from nxpipe.emulator.lower.loop_pipelining import _Cut
from nxpipe.emulator.lower.records import Record, ResidentProgram, TargetGraph
from nxpipe.emulator.lower.tile_placement import overlapping
from nxpipe.emulator.ops import Attention, Binary, Linear, Reshape, RmsNorm, Transpose, Unary
from tests.lower.harness import Case, case, floats, run
from tests.tiers import examples

BF16, F32 = DType.BFLOAT16, DType.FLOAT32
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


def _tile(offset: Affine | int, *axes: Axis, allocation: int = 1, start: int = 0, lanes: int = 4) -> Tile:
    return Tile(Memory.SBUF, F32, start, lanes, Affine() + offset, axes, allocation)


def _elements(tile: Tile, indices: tuple[int, ...] = ()) -> list[int]:
    """The byte of each element in a partition, in order."""
    ranges = [range(axis.size) for axis in tile.axes]
    steps = [axis.stride * tile.dtype.itemsize for axis in tile.axes]
    first = tile.offset.at(indices)
    return [first + sum(n * step for n, step in zip(place, steps, strict=True)) for place in product(*ranges)]


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_an_access_to_a_copy_is_the_same_access_to_its_source_or_stays(data: st.DataObject) -> None:
    """Every element of a redirected tile is where the copy took it from."""
    sizes = data.draw(st.lists(SIZES, min_size=1, max_size=3))
    order = data.draw(st.permutations(range(len(sizes))))
    strides, reach = [0] * len(sizes), 1
    for axis in order:  # the source in any order of axes, with gaps
        strides[axis] = reach * data.draw(st.sampled_from([1, 2]))
        reach = strides[axis] * sizes[axis]
    own = _tile(256, *contiguous(*sizes))
    source = _tile(4096, *(Axis(size, stride) for size, stride in zip(sizes, strides, strict=True)), allocation=-1)
    mapping = _Mapping.of(own, source, Allocation(Memory.SBUF, 256, 4096, 1, 0), 0, ())
    assert mapping is not None
    found_at = dict(zip(_elements(own), _elements(source), strict=True))
    total = int(np.prod(sizes))
    stride = data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, max(1, (total - 1 - first) // stride + 1)))
    part = _tile(256 + 4 * first, Axis(count, stride), lanes=2, start=1)
    redirected = mapping.redirected(part, (), may_split=True)
    if redirected is not None:
        assert _elements(redirected) == [found_at[byte] for byte in _elements(part)]
        assert (redirected.start, redirected.partitions, redirected.allocation) == (1, 2, -1)
    else:
        assert count > 1  # a single element can always be found


def test_a_copy_in_a_loop_is_undone_for_a_reader_behind_the_loop() -> None:
    """Four iterations fill the tile; the reader sees what all of them have written."""
    own = _tile(index(0) * 32, Axis(8, 1))
    source = _tile(8192 + index(0) * 128, Axis(8, 2), allocation=-1)
    mapping = _Mapping.of(own, source, Allocation(Memory.SBUF, 0, 128, 1, 0), 0, (4,))
    assert mapping is not None
    whole = mapping.redirected(_tile(0, Axis(32, 1)), (), may_split=True)
    assert whole is not None
    assert _elements(whole) == [8192 + 128 * turn + 8 * element for turn in range(4) for element in range(8)]


def _layer(builder: GraphBuilder, x: Value, *weights: Value) -> Value:
    """An encoder's layer: norm, attention of four heads, and a gated feed-forward layer."""
    rows, width = x.type.shape
    normal = builder.add(RmsNorm(1, 1e-5), x)

    def heads(weight: Value) -> Value:
        split = builder.add(Reshape((1, rows, 4, width // 4)), builder.add(Linear(BF16), normal, weight))
        return builder.add(Transpose((0, 2, 1, 3)), split)

    q, k, v, out, up, down = weights
    seen = builder.add(Attention(0.2, False, BF16, BF16), heads(q), heads(k), heads(v))
    merged = builder.add(Reshape((rows, width)), builder.add(Transpose((0, 2, 1, 3)), seen))
    x = builder.add(Binary("add"), x, builder.add(Linear(BF16), merged, out))
    hidden = builder.add(Unary("gelu"), builder.add(Linear(BF16), builder.add(RmsNorm(1, 1e-5), x), up))
    return builder.add(Binary("add"), x, builder.add(Linear(BF16), hidden, down))


def _case(rows: int, width: int = 256) -> Case:
    shapes = ((width, width),) * 4 + ((2 * width, width), (width, 2 * width))
    weights = [floats(*shape, dtype=BF16, seed=seed, role=Role.PARAMETER) for seed, shape in enumerate(shapes, 1)]
    return case(_layer, floats(rows, width, dtype=BF16), *weights)


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    """What each step of the back end makes of a layer of 384 rows."""
    return dict(run_backend(TargetGraph(_case(384).graph, "v2", 1)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("core", ["v2", "v3"])
@pytest.mark.parametrize("rows", [1, 8, 128, 200, 384])
def test_scheduling_changes_no_bit_of_a_layer(rows: int, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = _case(rows)
    scheduled = lower(one.graph, core)
    steps = tuple(step for step in BACKEND if step.__name__ not in ("forward_copies", "schedule_kernels"))
    monkeypatch.setattr(backend, "BACKEND", steps)
    plain = lower(one.graph, core)
    assert scheduled.body != plain.body
    expected = run(plain, one)
    for order in ("hostile", "random:3"):
        for name, values in run(scheduled, one, order).items():
            assert np.array_equal(values, expected[name], equal_nan=True), f"{name} in the order {order}"


def _resident(records: dict[str, Record], after: str) -> ResidentProgram:
    record = records[after]
    assert isinstance(record, ResidentProgram)
    return record


def _within_sbuf(body: tuple[Step, ...]) -> list[DmaCopy]:
    copies = (step for step in instructions(body) if isinstance(step, DmaCopy))
    return [copy for copy in copies if isinstance(copy.dst, Tile) and isinstance(copy.src, Tile)]


def test_engines_access_promoted_buffers_without_copies_of_them(records: dict[str, Record]) -> None:
    before, after = (_within_sbuf(_resident(records, step).body) for step in ("reserve_sbuf", "forward_copies"))
    assert before
    assert not [copy for copy in after if copy.dst.start == copy.src.start]  # type: ignore[union-attr]


def test_tiles_that_are_live_together_share_no_bytes_and_a_moved_tile_is_found(records: dict[str, Record]) -> None:
    placed = _resident(records, "schedule_kernels")
    assert not list(overlapping(placed))
    numbers = sorted(placed.emitted.allocations)
    moved = dict.fromkeys(numbers, placed.emitted.allocations[numbers[0]])
    spoiled = ResidentProgram(
        **{**vars(placed), "emitted": type(placed.emitted)(**{**vars(placed.emitted), "allocations": moved})}
    )
    assert list(overlapping(spoiled))


def test_loads_that_need_no_kernel_are_on_queues_without_other_copies(records: dict[str, Record]) -> None:
    program = records[BACKEND[-1].__name__]
    assert isinstance(program, Program)
    queues: dict[Engine, set[bool]] = {}
    for step in instructions(program.body):
        if step.engine in DMA_QUEUES and isinstance(step, DmaCopy):
            role = program.buffers[step.src.buffer].role if isinstance(step.src, Far) else None
            queues.setdefault(step.engine, set()).add(role in (Role.PARAMETER, Role.CONSTANT, Role.STATE))
    assert all(len(kinds) == 1 for kinds in queues.values())
    assert {True} in queues.values()


def _move(dst: Tile, src: Tile) -> TensorCopy:
    return TensorCopy(engine=Engine.VECTOR, dst=dst, src=src)


def _cut(first: Step, second: Step, *, depth: int = 1, buffers: int = 1) -> _Cut:
    tile = Allocation(Memory.SBUF, 0, 64, buffers, depth)
    return _Cut((first,), (second,), (), {1: tile, 2: Allocation(Memory.SBUF, 4096, 4096, 1, 0)})


def test_a_loop_is_pipelined_only_if_the_next_iteration_needs_nothing_of_the_current_one() -> None:
    private, outer = _tile(0, Axis(4, 1)), _tile(4096, Axis(4, 1), allocation=2)
    moving = _tile(4096 + index(0) * 16, Axis(4, 1), allocation=2)
    behind = _tile(4112 + index(0) * 16, Axis(4, 1), allocation=2)
    assert _cut(_move(private, moving), _move(moving, private)).is_legal(4)
    assert not _cut(_move(private, outer), _move(outer, private)).is_legal(4)  # the result is the next operand
    assert not _cut(_move(private, moving), _move(behind, private)).is_legal(4)  # so it is one iteration later
    assert not _cut(_move(private, moving), _move(moving, private), depth=0).is_legal(4)  # kept over iterations


def test_a_pipelined_loop_executes_each_instruction_with_the_operands_that_it_had() -> None:
    private, moving = _tile(0, Axis(4, 1)), _tile(4096 + index(0) * 16, Axis(4, 1), allocation=2)
    result = _tile(8192 + index(0) * 16, Axis(4, 1), allocation=2)
    cut = _cut(_move(private, moving), _move(result, private))
    begin, main, end = cut.rotated(5)
    assert isinstance(begin, Loop)
    assert isinstance(main, Loop)
    assert isinstance(end, Loop)
    assert [loop.count for loop in (begin, main, end)] == [1, 4, 1]
    read, written, used = [], [], []
    for loop in (begin, main, end):
        for turn in range(loop.count):
            for step in loop.body:
                assert isinstance(step, TensorCopy)
                if step.src.allocation == 2:
                    read.append(step.src.offset.at((turn,)))
                    used.append(("filled", step.dst.offset.at((turn,))))
                else:
                    written.append(step.dst.offset.at((turn,)))
                    used.append(("read", step.src.offset.at((turn,))))
    assert read == [4096 + 16 * turn for turn in range(5)]
    assert written == [8192 + 16 * turn for turn in range(5)]
    assert [place for kind, place in used if kind == "filled"] == [0, 64, 0, 64, 0]
    assert [place for kind, place in used if kind == "read"] == [0, 64, 0, 64, 0]


def test_rotation_within_an_iteration_is_not_taken_for_one_by_iteration() -> None:
    rotating = _tile(rotating_offset(index(0) * 3 + index(1), 2, 64), Axis(4, 1))
    by_turn = _tile(rotating_offset(index(0), 2, 64), Axis(4, 1))
    source = _tile(4096 + index(0) * 16, Axis(4, 1), allocation=2)
    for tile, is_legal in ((rotating, False), (by_turn, True)):
        fill = Loop(3, (_move(tile, source),))
        assert _cut(fill, _move(source, by_turn), buffers=2).is_legal(4) is is_legal
