"""The back end is a list of steps from record to record; its checker names the step that violates an invariant."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine, Wait
from nxpipe.emulator.isa.program import Loop, Program, Step, instructions
from nxpipe.emulator.lower import BACKEND, backend, lower, record_text
from nxpipe.emulator.lower.backend import LoweringInvalid, run_backend
from nxpipe.emulator.lower.emission import emit_kernels
from nxpipe.emulator.lower.hbm_buffers import place_interface
from nxpipe.emulator.lower.records import EmittedProgram, PlacedGraph, Record, ResidentProgram, TargetGraph
from nxpipe.emulator.ops import Binary, Linear, RmsNorm, Unary
from tests.lower.harness import Case, case, require_equal, wholes

BF16 = DType.BFLOAT16


def _gated(builder: GraphBuilder, x: Value, scale: Value, gate: Value, up: Value, down: Value) -> Value:
    """A norm and a gated MLP: two matmuls of the same rows that meet in one node, and a third."""
    normed = builder.add(RmsNorm(1, 1e-6), x, scale)
    gated = builder.add(Unary("silu"), builder.add(Linear(BF16), normed, gate))
    met = builder.add(Binary("multiply"), gated, builder.add(Linear(BF16), normed, up))
    return builder.add(Linear(BF16), met, down)


@pytest.fixture(scope="module")
def gated() -> Case:
    shapes = ((256, 64), (64,), (96, 64), (96, 64), (64, 96))
    return case(_gated, *(wholes(*shape, dtype=BF16, most=1, seed=seed) for seed, shape in enumerate(shapes)))


def records(graph: Graph) -> dict[str, Record]:
    return dict(run_backend(TargetGraph(graph, "v2", 1)))


def test_each_step_returns_the_record_of_its_kind_and_the_last_is_the_program(gated: Case) -> None:
    found = records(gated.graph)
    assert list(found) == [step.__name__ for step in BACKEND]
    kinds = [PlacedGraph, EmittedProgram, *[ResidentProgram] * 4, Program, Program, Program]
    assert [type(record) for record in found.values()] == kinds
    assert found["eliminate_redundant_waits"] == lower(gated.graph, "v2")
    require_equal(gated)


def test_matmuls_of_one_norm_share_its_kernel_with_what_follows_them(gated: Case) -> None:
    emitted = records(gated.graph)["emit_kernels"]
    assert isinstance(emitted, EmittedProgram)

    def labels(nodes: tuple[Node, ...]) -> list[str]:
        return [node.op.label for node in nodes]

    norm, last = emitted.kernels
    assert (norm.node.op.label, labels(norm.fused)) == ("rms_norm", ["linear", "silu", "linear", "multiply"])
    assert (last.node.op.label, last.fused) == ("linear", ())
    text = record_text(gated.graph, "v2", 1, "emit_kernels")
    assert "  fused: silu bf16[256,96]" in text
    assert text.count("  tiling: ") == 2


def test_the_result_of_a_kernel_stays_in_sbuf_for_the_next_one(gated: Case) -> None:
    resident = records(gated.graph)["promote_to_sbuf"]
    assert isinstance(resident, ResidentProgram)
    assert [entry.buffer.shape for entry in resident.residents] == [(256, 96)]
    assert "resident scratch bfloat16[256, 96]: bytes " in record_text(gated.graph, "v2", 1, "promote_to_sbuf")


def test_redundant_waits_are_all_that_the_last_step_removes(gated: Case) -> None:
    *_, inserted, final = records(gated.graph).values()
    assert isinstance(inserted, Program)
    assert isinstance(final, Program)
    pairs = list(zip(instructions(inserted.body), instructions(final.body), strict=True))
    assert all(set(after.waits) <= set(before.waits) for before, after in pairs)
    assert sum(len(before.waits) for before, _ in pairs) > sum(len(after.waits) for _, after in pairs) > 0


def _first(body: tuple[Step, ...], change: Callable[[Any], Step]) -> tuple[Step, ...]:
    """The body with its first instruction changed."""
    first, *rest = body
    return (replace(first, body=_first(first.body, change)) if isinstance(first, Loop) else change(first), *rest)


def _drop_kernel(emitted: EmittedProgram) -> EmittedProgram:
    return replace(emitted, kernels=emitted.kernels[:-1])


def _compute_twice(emitted: EmittedProgram) -> EmittedProgram:
    return replace(emitted, kernels=(*emitted.kernels, emitted.kernels[-1]))


def _lose_view(placed: PlacedGraph) -> PlacedGraph:
    return replace(placed, views=dict(list(placed.views.items())[1:]))


def _lose_buffer(resident: ResidentProgram) -> ResidentProgram:
    return replace(resident, buffers=resident.buffers[:1])


def _share_sbuf(resident: ResidentProgram) -> ResidentProgram:
    return replace(resident, residents=(*resident.residents, resident.residents[0]))


def _overlap(program: Program) -> Program:
    return replace(program, buffers=tuple(replace(buffer, address=0) for buffer in program.buffers))


def _wait_too_long(program: Program) -> Program:
    return replace(program, body=_first(program.body, lambda step: step.after(Wait(Engine.TENSOR, Affine(10**6)))))


def _change_instruction(program: Program) -> Program:
    return replace(program, body=_first(program.body, lambda step: replace(step, engine=Engine.DMA3)))


@pytest.mark.parametrize(
    ("step", "spoil", "reason"),
    [
        ("place_interface", _lose_view, "has no location"),
        ("emit_kernels", _drop_kernel, "no kernel computes linear"),
        ("emit_kernels", _compute_twice, "computed by two kernels"),
        ("promote_to_sbuf", _lose_buffer, "buffer"),
        ("promote_to_sbuf", _share_sbuf, "share bytes of SBUF while both are live"),
        ("allocate_hbm", _overlap, "use disjoint addresses"),
        ("allocate_hbm", _change_instruction, "the instructions changed with the addresses"),
        ("insert_waits", _wait_too_long, "than precede it in program order"),
        ("insert_waits", _change_instruction, "instructions changed with the waits"),
        ("eliminate_redundant_waits", _wait_too_long, "a wait that it did not have before"),
    ],
)
def test_a_step_that_breaks_its_record_is_named(
    step: str, spoil: Callable[[Any], Any], reason: str, gated: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(right: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def wrong(record: Any) -> Any:
            return spoil(right(record))

        wrong.__name__ = right.__name__
        return wrong

    steps = tuple(spoiled(entry) if entry.__name__ == step else entry for entry in BACKEND)
    monkeypatch.setattr(backend, "BACKEND", steps)
    with pytest.raises(LoweringInvalid, match=f"^after {step}, .*{reason}") as caught:
        lower(gated.graph, "v2")
    assert caught.value.after == step


def test_an_emission_does_not_change_the_placed_graph_that_it_starts_from(gated: Case) -> None:
    placed = place_interface(TargetGraph(gated.graph, "v2", 1))
    before = (placed.buffers, dict(placed.views), dict(placed.homes), dict(placed.constants))
    first, second = emit_kernels(placed), emit_kernels(placed)
    assert (placed.buffers, dict(placed.views), dict(placed.homes), dict(placed.constants)) == before
    assert first.body == second.body
    assert first.buffers == second.buffers
