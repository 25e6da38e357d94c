"""The reported utilisation of a program equals a count by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.analysis.execution_trace import DMA
from nxpipe.emulator.analysis.program_memory import footprint, require_capacity
from nxpipe.emulator.analysis.utilization import BufferTraffic, Spill, buffer_traffic, utilisation
from nxpipe.emulator.errors import OutOfMemory
from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Axis, Far, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step
from tests.isa.assembler import program
from tests.isa.page import EXAMPLES
from tests.isa.samples import FLOAT, around, inside, tile

# A sum of products goes to HBM, and comes back in two halves that are added. Who waits for whom changes no count.
A, B, C, SUMS = (
    f"{place} : f32 128]" for place in ("sbuf[0:128, 0", "sbuf[0:128, 512", "sbuf[0:128, 1024", "psum[0:128, 0")
)
LEFT, RIGHT, ANSWER = (f"sbuf[0:128, {offset} : f32 64]" for offset in (1536, 1792, 2048))
THERE_AND_BACK = f"""core v2, ranks 1
input x: f32[128,128] at 0
parameter w: f32[128,128] at 65536
scratch s: f32[128,128] at 131072
output y: f32[128,64] at 196608

at 1
dma0 dma_copy {A} <- x[0 : f32 128x128]
loop i0 < 3:
  dma1 dma_copy {B} <- w[0 : f32 128x128]
  tensor nc_matmul {SUMS} <- stationary={B}, moving={A}, accumulate=i0
vector tensor_copy {C} <- {SUMS}
dma0 dma_copy s[0 : f32 128x128] <- {C}
at 2
dma2 dma_copy {LEFT} <- s[0 : f32 128@128 x 64]
dma3 dma_copy {RIGHT} <- s[64 : f32 128@128 x 64]
vector tensor_tensor {ANSWER} <- left={LEFT}, right={RIGHT}, op=add
dma4 dma_copy y[0 : f32 128x64] <- {ANSWER}

note 1 "layers.0.up model.py:7"
note 2 "layers.0.down"
"""
TILE = 128 * 128 * 4


def test_a_small_program_is_counted_as_by_hand() -> None:
    found = utilisation(program(THERE_AND_BACK))
    document = found.document()
    assert document["bytes"]["hbm"] == {"read": TILE + 3 * TILE + TILE, "written": TILE + TILE // 2}
    assert document["bytes"]["psum"] == {"read": 2 * TILE + TILE, "written": 3 * TILE}
    assert document["hbm"] == {
        "compulsory": {"constant": 0, "input": TILE, "output": TILE // 2, "parameter": TILE, "state": 0},
        "compulsory_bytes": 5 * TILE // 2,
        "moved_bytes": 13 * TILE // 2,
        "ratio": 2.6,
    }
    assert document["spilled"] == {
        "bytes": 2 * TILE,
        "largest": [{"module": "layers.0.up", "bytes_written": TILE, "bytes_read": TILE}],
        "rest": {"modules": 0, "bytes": 0},
    }
    instructions = document["instructions"]
    assert (instructions["static"], instructions["carried_out"]) == (9, 13)
    assert instructions["by_engine"]["dma1"] == {"dma_copy": {"static": 1, "carried_out": 3}}
    assert sorted(instructions["by_engine"]["vector"]) == ["tensor_copy", "tensor_tensor"]
    # Float32 takes four passes: 128 columns each, of an array that is full.
    assert document["tensor_engine"]["busy_cycles"] == document["tensor_engine"]["ideal_cycles"] == 3 * 4 * 128
    roles = {"input": TILE, "parameter": TILE, "scratch": TILE, "output": TILE // 2, "state": 0, "constant": 0}
    assert {name: nbytes for name, nbytes in document["footprint"].items() if name in roles} == roles
    assert document["footprint"]["total"] == 7 * TILE // 2
    assert "2.60 x what must move" in found.sentence()
    assert "\n" not in found.sentence()


def test_scratch_is_that_of_the_module_that_writes_most_of_it() -> None:
    further = THERE_AND_BACK.replace("at 2\n", f"at 2\nloop i0 < 2:\n  dma1 dma_copy s[0 : f32 128x128] <- {C}\n")
    assert utilisation(program(further)).spills == (Spill("layers.0.down", 3 * TILE, TILE),)


def test_the_smaller_spills_are_summed_up() -> None:
    one = program(THERE_AND_BACK)
    spills = tuple(Spill(f"layers.{number}", 100 - number, 5) for number in range(12))
    spilled = replace(utilisation(one), spills=spills).document()["spilled"]
    assert [entry["module"] for entry in spilled["largest"]] == [f"layers.{number}" for number in range(10)]
    assert spilled["rest"] == {"modules": 2, "bytes": 90 + 89 + 5 + 5}


def test_rows_of_a_table_count_and_not_the_table() -> None:
    """docs/reference/isa.md's gather: 64 rows of 96 numbers out of a thousand."""
    found = utilisation(program(EXAMPLES[2]))
    assert found.compulsory[Role.PARAMETER] == 64 * 96 * 2
    assert found.ratio == 1.0


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_report_of_any_program_adds_up(text: str) -> None:
    found = utilisation(program(text))
    assert found.ratio is None or found.ratio >= 1
    assert found.bound in found.busy_ns
    document = found.document()
    assert document["hbm"]["moved_bytes"] == sum(document["bytes"]["hbm"].values())
    counted = [counts for kinds in document["instructions"]["by_engine"].values() for counts in kinds.values()]
    for key in ("static", "carried_out"):
        assert sum(counts[key] for counts in counted) == document["instructions"][key]


def test_an_empty_program_uses_nothing() -> None:
    found = utilisation(around())
    assert (found.ratio, found.bound, found.spilled, found.traffic) == (None, None, 0, 0)
    assert found.document()["tensor_engine"]["utilisation"] is None


def test_copies_on_several_queues_share_the_engines() -> None:
    """Two copies that need all sixteen engines take as long on two queues as on one; two that need one do not."""

    def busy(engines: tuple[Engine, Engine], lanes: int) -> float:
        copies = [
            DmaCopy(
                engine=engine, dst=tile(lanes, 1024), src=Far(0, FLOAT, Affine(), (Axis(lanes, 4096), Axis(1024, 1)))
            )
            for engine in engines
        ]
        return utilisation(around(*copies)).busy_ns[DMA]

    one, two = (Engine.DMA0, Engine.DMA0), (Engine.DMA0, Engine.DMA1)
    assert busy(one, 128) == pytest.approx(busy(two, 128))
    assert busy(one, 8) == pytest.approx(2 * busy(two, 8))


def _state(*body: Step) -> Program:
    one = around(*body)
    return replace(one, buffers=(replace(one.buffers[0], role=Role.STATE), *one.buffers[1:]))


def _copied(size: int, at: Affine | int = 0, *, written: bool, rows: Tile | None = None) -> DmaCopy:
    """A copy of so many rows between the first buffer and a tile in SBUF."""
    offset = at if isinstance(at, Affine) else Affine(at)
    far, near = Far(0, FLOAT, offset, (Axis(size, 4096), Axis(4096, 1)), rows), tile(size, 4096)
    return DmaCopy(engine=Engine.DMA0, dst=far, src=near) if written else DmaCopy(engine=Engine.DMA0, dst=near, src=far)


ROW = 4096 * 4


def test_what_the_run_has_written_itself_need_not_be_read_again() -> None:
    written_first = _state(_copied(8, written=True), _copied(32, written=False))
    assert buffer_traffic(written_first)[0] == BufferTraffic(read=24 * ROW, written=8 * ROW)
    read_first = _state(_copied(32, written=False), _copied(8, written=True))
    assert buffer_traffic(read_first)[0] == BufferTraffic(read=32 * ROW, written=8 * ROW)


def test_a_step_that_writes_one_row_by_number_and_reads_all_moves_all_of_it_once() -> None:
    rows = tile(1, 1)
    step = _state(_copied(1, written=True, rows=rows), _copied(128, written=False))
    assert buffer_traffic(step)[0] == BufferTraffic(read=127 * ROW, written=ROW)


def test_rows_by_number_are_never_more_than_there_are() -> None:
    copied = _copied(100, written=False, rows=tile(100, 1))
    assert buffer_traffic(_state(Loop(3, (copied,))))[0].read == 128 * ROW


@given(
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=2),
    uses=st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 200),
            st.lists(st.tuples(st.integers(1, 5), st.integers(-7, 40)), min_size=1, max_size=3),
            st.lists(st.integers(-20, 60), min_size=2, max_size=2),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_every_byte_counts_once_whatever_the_pattern(
    counts: list[int], uses: list[tuple[bool, int, list[tuple[int, int]], list[int]]]
) -> None:
    """Held against the elements of each access one by one, in the order of the text."""
    read: set[int] = set()
    written: set[int] = set()
    body = []
    for is_written, start, sizes, steps in uses:
        offset = Affine(1000 + start) + index(0) * steps[0] + index(1) * steps[1]
        place = Far(0, FLOAT, offset, tuple(Axis(size, stride) for size, stride in sizes))
        other = Far(1, FLOAT, Affine(), place.axes)
        body.append(
            DmaCopy(engine=Engine.DMA0, dst=place, src=other)
            if is_written
            else DmaCopy(engine=Engine.DMA0, dst=other, src=place)
        )
        elements = {offset.at((i, j)) for i in range(counts[0]) for j in range(counts[1])}
        for size, stride in sizes:
            elements = {element + number * stride for element in elements for number in range(size)}
        if is_written:
            written |= elements
        else:
            read |= elements - written
    found = buffer_traffic(_state(inside(*counts, body=tuple(body))))[0]
    assert found == BufferTraffic(4 * len(read), 4 * len(written))


def test_scratch_counts_at_its_peak() -> None:
    """docs/reference/isa.md's first program with its output as scratch, and another that lies in the same place."""
    one = program(EXAMPLES[0])
    shared = replace(one.buffers[-1], role=Role.SCRATCH)
    both = replace(one, buffers=(*one.buffers[:-1], shared, replace(shared, names=("other",))))
    assert footprint(both).by_role[Role.SCRATCH] == shared.nbytes
    assert footprint(both).total == shared.address + shared.nbytes


def test_a_refusal_names_what_is_there_at_the_peak_by_who_makes_it() -> None:
    """A second scratch buffer, smaller and used after the first one, is not there by then."""
    later = Buffer(Role.SCRATCH, ("t",), FLOAT, (128, 64), address=131072)
    use = [_moved(Far(4, FLOAT, Affine(), contiguous(128, 64)), written) for written in (True, False)]
    one = program(THERE_AND_BACK)
    both = replace(one, buffers=(*one.buffers, later), body=(*one.body, *use))
    require_capacity(both, both.hbm)
    with pytest.raises(OutOfMemory) as caught:
        require_capacity(both, both.hbm - 1)
    fault = caught.value
    assert [(taken.what, taken.nbytes) for taken in fault.largest] == [
        ("input x", TILE),
        ("parameter w", TILE),
        ("the output of layers.0.up", TILE),
        ("output y", TILE // 2),
    ]
    assert f"the program needs {both.hbm:,} bytes of HBM behind each core, and {both.hbm - 1:,} are available" in str(
        fault
    )


def _moved(far: Far, written: bool) -> DmaCopy:
    near = tile(*(axis.size for axis in far.axes))
    return DmaCopy(engine=Engine.DMA0, dst=far if written else near, src=near if written else far)
