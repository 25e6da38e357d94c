"""Each pass preserves a graph's results; the checker detects wrong graphs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.errors import ExecutionError, GraphInvalid, OptionsInvalid
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    Attention,
    Binary,
    Broadcast,
    Cast,
    Gather,
    Index,
    Iota,
    Linear,
    Reshape,
    Softmax,
    Transpose,
    Unary,
    Where,
)
from nxpipe.emulator.passes import PASSES, PassOptions, check, run_passes
from nxpipe.emulator.passes.precision import autocast
from nxpipe.emulator.passes.simplify import (
    LARGEST_FOLDED_CONSTANT,
    advance_parameter_arithmetic,
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fold_constants,
)
from nxpipe.emulator.run.fast import execute
from tests.emulator.random_graphs import arguments, graphs
from tests.tiers import examples

F32, BF16, I64 = DType.FLOAT32, DType.BFLOAT16, DType.INT64
PLAIN = PassOptions()
slow_to_draw = settings(max_examples=examples(60))


def same_results(graph: Graph, changed: Graph, seed: int) -> None:
    parameters, inputs = arguments(graph, seed)
    try:
        expected = execute(graph, parameters, inputs)
    except ExecutionError:
        return  # a random index may leave its table; then there is no result to keep
    found = execute(changed, parameters, inputs)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


@given(graph=graphs(), seed=st.integers(0, 9))
@settings(max_examples=examples(100))
def test_every_pass_keeps_the_results_of_random_graphs_to_the_last_bit(graph: Graph, seed: int) -> None:
    """Each pass on its own; to draw a graph takes longer than to rewrite it, so all are given the same ones."""
    for rewrite in dict.fromkeys(PASSES):
        changed = rewrite(graph, PLAIN)
        check(changed, after=rewrite.__name__)
        same_results(graph, changed, seed)


@given(graph=graphs(), seed=st.integers(0, 9))
@slow_to_draw
def test_all_passes_together_keep_results_and_a_second_round_finds_nothing(graph: Graph, seed: int) -> None:
    lowered = run_passes(graph, PLAIN)
    same_results(graph, lowered, seed)
    assert run_passes(lowered, PLAIN).key == lowered.key
    assert len(lowered.nodes) <= len(graph.nodes)


@given(graph=graphs())
@slow_to_draw
def test_a_lowered_graph_survives_its_bytes(graph: Graph) -> None:
    lowered = run_passes(graph, PassOptions("all", "bf16"))
    assert decode(lowered.to_bytes()).key == lowered.key


few = settings(max_examples=20)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mode", ["matmult", "all"])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "tf32"])
@given(graph=graphs())
@few
def test_autocast_leaves_no_matrix_operand_in_float32(mode: str, kind: str, graph: Graph) -> None:
    for node in run_passes(graph, PassOptions(mode, kind)).nodes:
        for operand in node.operands[: node.op.matrix_operands]:
            assert operand.type.dtype is not F32


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "tf32"])
@given(graph=graphs())
@few
def test_all_leaves_no_float32_tensor_but_outputs_and_what_is_rounded_at_once(kind: str, graph: Graph) -> None:
    options = PassOptions("all", kind)
    changed = run_passes(graph, options)
    outputs = set(changed.outputs.values())
    for node in changed.nodes:
        wide = [operand for operand in node.operands if operand.type.dtype is F32 and operand.type.rank]
        assert not wide or node.op == Cast(options.narrow)
        if node.result in outputs and node.result.type.dtype is F32 and node.result.type.rank:
            assert node.op == Cast(F32)


def test_matmult_rounds_operands_and_keeps_sums_in_float32() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((1, 2), F32))
    w = builder.parameter("w", TensorType((1, 2), F32))
    builder.output("y", builder.add(Linear(F32), x, w))
    graph = run_passes(builder.build(), PassOptions("matmult", "bf16"))
    assert [node.op for node in graph.nodes] == [Cast(BF16), Cast(BF16), Linear(F32)]
    fine = np.array([[1 + 2.0**-9, 2.0**-20]], np.float32)
    found = execute(graph, {"w": np.ones((1, 2), np.float32)}, {"x": fine})
    assert found["y"].item() == 1 + 2.0**-20  # the operand lost its ninth bit, the sum kept its twentieth


def test_all_casts_scalars_only_where_they_make_a_tensor() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2,), F32))
    mask = builder.add(Binary("less"), x, builder.scalar(0.0))
    additive = builder.add(Where(), mask, builder.scalar(0.0), builder.scalar(-1.0))
    builder.output("y", builder.add(Binary("add"), x, additive))
    graph = run_passes(builder.build(), PassOptions("all", "bf16"))
    assert next(iter(graph.outputs.values())).type.dtype is F32
    assert [node.result.type.dtype for node in graph.nodes if isinstance(node.op, Binary)][-1] is BF16


def test_attention_rounds_its_probabilities_like_its_operands() -> None:
    builder = GraphBuilder()
    q = builder.input("q", TensorType((2, 4), F32))
    op = Attention(scale=1.0, causal=False, probabilities=F32, out=F32)
    builder.output("y", builder.add(op, q, q, q))
    graph = autocast(builder.build(), PassOptions("matmult", "bf16"))
    assert graph.nodes[-1].op == replace(op, probabilities=BF16)


@pytest.mark.parametrize(("mode", "kind"), [("some", "bf16"), ("all", "fp4")])
def test_an_unknown_option_is_refused(mode: str, kind: str) -> None:
    with pytest.raises(OptionsInvalid, match="choose one of"):
        PassOptions(mode, kind)


def test_an_attention_mask_that_selects_everything_becomes_a_view() -> None:
    builder = GraphBuilder()
    mask = builder.input("mask", TensorType((2, 5), I64))
    row = builder.add(Reshape((2, 1, 1)), builder.add(Iota(2, 0, 1, I64)))
    column = builder.add(Reshape((1, 1, 5)), builder.add(Iota(5, 0, 1, I64)))
    builder.output("y", builder.add(Index((0, 1)), mask, row, column))
    assert [node.op for node in run_passes(builder.build(), PLAIN).nodes] == [Reshape((2, 1, 5))]


def test_an_index_in_another_order_stays_an_index() -> None:
    builder = GraphBuilder()
    mask = builder.input("mask", TensorType((2, 2), I64))
    first = builder.constant(np.arange(2).reshape(1, 2), I64)
    second = builder.constant(np.arange(2).reshape(2, 1), I64)
    builder.output("y", builder.add(Index((0, 1)), mask, first, second))
    graph = run_passes(builder.build(), PLAIN)
    assert [node.op for node in graph.nodes] == [Index((0, 1))]
    found = execute(graph, {}, {"mask": np.array([[1, 2], [3, 4]])})
    assert found["y"].tolist() == [[1, 3], [2, 4]]


def test_chains_of_views_become_one() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3, 4), F32))
    y = builder.add(Transpose((1, 0, 2)), builder.add(Transpose((2, 0, 1)), x))
    y = builder.add(Reshape((24,)), builder.add(Reshape((4, 6)), y))
    builder.output("y", builder.add(Unary("exp"), builder.add(Cast(F32), y)))
    ops = [node.op for node in run_passes(builder.build(), PLAIN).nodes]
    assert ops == [Transpose((0, 2, 1)), Reshape((24,)), Unary("exp")]


@pytest.mark.parametrize("seen", [True, False])
def test_a_mask_that_is_true_everywhere_is_no_mask(seen: bool) -> None:
    builder = GraphBuilder()
    matrices = [builder.input(name, TensorType((2, 3, 5, 4), F32)) for name in "qkv"]
    table = np.ones((2, 1, 1, 5), np.bool_)
    table[1, 0, 0, 2] = seen
    mask = builder.add(Broadcast((2, 3, 5, 5)), builder.constant(table, DType.BOOL))
    builder.output("y", builder.add(Attention(0.5, False, F32, F32), *matrices, mask))
    graph = builder.build()
    changed = run_passes(graph, PLAIN, (canonicalise, eliminate_dead_code))
    assert [len(node.operands) for node in changed.nodes if isinstance(node.op, Attention)] == [3 if seen else 4]
    same_results(graph, changed, seed=0)


def test_a_constant_without_effect_only_repeats_the_other_operand() -> None:
    builder = GraphBuilder()
    mask = builder.input("mask", TensorType((2, 1, 1, 5), DType.BOOL))
    seen = builder.add(Binary("and"), builder.constant(np.ones((1, 1, 5, 1), np.bool_), DType.BOOL), mask)
    builder.output("y", seen)
    graph = builder.build()
    changed = run_passes(graph, PLAIN, (canonicalise, eliminate_dead_code))
    assert [node.op for node in changed.nodes] == [Broadcast((2, 1, 5, 5))]
    same_results(graph, changed, seed=0)


def test_adding_zero_to_a_float_is_kept_because_it_changes_the_sign_of_zero() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((1,), F32))
    builder.output("y", builder.add(Binary("add"), x, builder.scalar(0.0)))
    assert len(canonicalise(builder.build(), PLAIN).nodes) == 1


@pytest.mark.parametrize("narrow", [DType.FLOAT16, DType.INT32])
def test_a_cast_to_a_narrower_float_precedes_the_moves_before_it(narrow: DType) -> None:
    builder = GraphBuilder()
    x = builder.add(Unary("exp"), builder.input("x", TensorType((4, 6), F32)))
    moved = builder.add(Transpose((1, 2, 0)), builder.add(Reshape((4, 2, 3)), x))
    builder.output("y", builder.add(Cast(narrow), moved))
    graph = builder.build()
    changed = run_passes(graph, PLAIN, (canonicalise, eliminate_dead_code))
    kinds = [type(node.op) for node in changed.nodes]
    assert kinds == ([Unary, Cast, Reshape, Transpose] if narrow.is_float else [Unary, Reshape, Transpose, Cast])
    same_results(graph, changed, seed=0)


def test_a_constant_too_large_to_ship_is_computed_where_it_is_used() -> None:
    builder = GraphBuilder()
    side = int(LARGEST_FOLDED_CONSTANT**0.5) + 1
    line = builder.add(Iota(side, 0, 1, DType.INT32))
    column = builder.add(Reshape((side, 1)), line)
    builder.output("mask", builder.add(Binary("less"), line, column))
    graph = run_passes(builder.build(), PLAIN)
    assert [node.op for node in graph.nodes] == [Binary("less")]
    assert sum(value.type.nbytes for value in graph.constants) <= LARGEST_FOLDED_CONSTANT


def test_the_same_question_is_asked_once() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 2), F32))
    twice = [builder.add(Softmax(1, log=False), builder.add(Unary("exp"), x)) for _ in range(2)]
    builder.output("y", builder.add(Binary("add"), *twice))
    assert len(eliminate_common_subexpressions(builder.build(), PLAIN).nodes) == 3


def test_dead_parameters_and_constants_leave_with_dead_code_and_inputs_stay() -> None:
    builder = GraphBuilder()
    ids = builder.input("ids", TensorType((2,), I64))
    builder.input("unused", TensorType((2,), I64))
    builder.add(Gather(0), builder.parameter("dead", TensorType((9, 2), F32)), ids)
    builder.add(Binary("add"), ids, builder.scalar(7))
    builder.output("y", builder.add(Gather(0), builder.parameter("live", TensorType((9, 2), F32)), ids))
    graph = eliminate_dead_code(builder.build(), PLAIN)
    assert list(graph.inputs) == ["ids", "unused"]
    assert list(graph.parameters) == ["live"]
    assert len(graph.constants) == 0
    assert len(graph.nodes) == 1


def test_folding_leaves_what_depends_on_inputs() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3,), I64))
    steps = builder.add(Binary("multiply"), builder.add(Iota(3, 1, 1, I64)), builder.scalar(2))
    builder.output("y", builder.add(Binary("add"), x, steps))
    graph = eliminate_dead_code(fold_constants(builder.build(), PLAIN), PLAIN)
    assert [node.op for node in graph.nodes] == [Binary("add")]
    assert [data.tolist() for data in graph.constants.values()] == [[2, 4, 6]]


def valid() -> Graph:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3), F32))
    y = builder.add(Unary("exp"), x)
    builder.output("y", builder.add(Reshape((3, 2)), y))
    return builder.build()


def test_what_depends_on_parameters_only_precedes_the_result_that_it_is_combined_with() -> None:
    builder = GraphBuilder()
    x, weight, other = (
        builder.input("x", TensorType((2, 3), F32)),
        *(builder.parameter(name, TensorType((3,), F32)) for name in ("weight", "other")),
    )
    first = builder.add(Unary("sqrt"), x)
    scale = builder.add(Unary("rsqrt"), weight)
    scaled = builder.add(Binary("multiply"), first, scale)
    shift = builder.add(Unary("negate"), builder.add(Binary("multiply"), scale, other))
    builder.output("y", builder.add(Unary("relu"), builder.add(Binary("add"), scaled, shift)))
    graph = advance_parameter_arithmetic(builder.build(), PLAIN)
    labels = [node.op.label for node in graph.nodes]
    assert labels == ["rsqrt", "multiply", "negate", "sqrt", "multiply", "add", "relu"]
    check(graph, after="advancing")


def test_the_checker_catches_a_use_before_its_definition() -> None:
    graph = valid()
    with pytest.raises(GraphInvalid, match="after shuffling, reshape of  uses a value before it is defined"):
        check(replace(graph, nodes=graph.nodes[::-1]), after="shuffling")


def test_the_checker_catches_a_wrong_type() -> None:
    graph = valid()
    first, last = graph.nodes
    wrong = Node(Value(last.result.id, TensorType((6,), F32)), last.op, last.operands)
    with pytest.raises(GraphInvalid, match=r"yields f32\[3,2\], not f32\[6\]"):
        check(replace(graph, nodes=(first, wrong), outputs={"y": wrong.result}), after="meddling")


def test_the_checker_catches_a_value_defined_twice() -> None:
    graph = valid()
    with pytest.raises(GraphInvalid, match="defined twice"):
        check(replace(graph, nodes=(graph.nodes[0], *graph.nodes)), after="doubling")


def test_the_checker_catches_an_undefined_output() -> None:
    with pytest.raises(GraphInvalid, match="output 'y' is not defined"):
        check(replace(valid(), nodes=()), after="cutting")


def test_the_checker_catches_a_constant_of_another_type() -> None:
    builder = GraphBuilder()
    value = builder.constant(np.zeros(3), F32)
    builder.output("y", value)
    with pytest.raises(GraphInvalid, match="a constant of type"):
        check(replace(builder.build(), constants={value: np.zeros(3)}), after="widening")


def test_a_pass_that_changes_the_interface_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(graph: Graph, options: PassOptions) -> Graph:
        return replace(graph, outputs={"z": graph.outputs["y"]})

    monkeypatch.setattr("nxpipe.emulator.passes.PASSES", (rename,))
    with pytest.raises(GraphInvalid, match="rename changed the graph's inputs or outputs"):
        run_passes(valid(), PLAIN)


@pytest.mark.parametrize(
    ("indices", "axis", "fast"),
    [
        ([[2, 3, 4]], 0, True),
        ([[0, 2, 4], [6, 8, 10]], 0, True),
        ([[1, 1], [1, 1]], 1, True),
        ([5], 1, True),
        ([4, 3], 0, False),
        ([0, 1, 3], 0, False),
        ([[0, 1], [0, 1]], 0, False),
    ],
)
def test_a_gather_at_counted_constants_is_a_slice(indices: list[object], axis: int, fast: bool) -> None:
    builder = GraphBuilder()
    table = builder.input("table", TensorType((12, 7), DType.FLOAT32))
    rows = builder.constant(np.array(indices, np.int64), DType.INT64)
    builder.output("y", builder.add(Gather(axis), table, rows))
    graph = builder.build()
    simple = canonicalise(graph, PassOptions())
    assert any(isinstance(node.op, Gather) for node in simple.nodes) is not fast
    data = {"table": np.arange(84, dtype=np.float32).reshape(12, 7)}
    assert np.array_equal(execute(graph, {}, data)["y"], execute(simple, {}, data)["y"])


def test_a_mask_that_hides_nothing_is_dropped_with_its_shape() -> None:
    builder = GraphBuilder()
    mask = builder.input("mask", TensorType((2, 1, 1, 5), DType.BOOL))
    all_true = builder.constant(np.ones((1, 1, 3, 1), bool), DType.BOOL)
    builder.output("y", builder.add(Binary("and"), all_true, mask))
    (node,) = canonicalise(builder.build(), PassOptions()).nodes
    assert node.op == Broadcast((2, 1, 3, 5))
