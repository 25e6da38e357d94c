"""Fusion: applied in real models, exact up to rounding, and omitted where it is not permitted."""

from collections import Counter

import numpy as np
import pytest

from nxpipe.emulator.capture import example_inputs
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import (
    Attention,
    Binary,
    Broadcast,
    Linear,
    MatMul,
    Reduce,
    Reshape,
    RmsNorm,
    Softmax,
    Transpose,
    Unary,
)
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.fuse import fuse
from nxpipe.emulator.passes.simplify import (
    canonicalise,
    eliminate_common_subexpressions,
    eliminate_dead_code,
    fold_constants,
)
from nxpipe.emulator.run.fast import execute
from tests.emulator.divided_models import request
from tests.emulator.models import captured, relative_error, weights

F32 = DType.FLOAT32
PLAIN = PassOptions()


def prepared(graph: Graph) -> Graph:
    """The graph as it reaches fusion."""
    for rewrite in (fold_constants, canonicalise, eliminate_common_subexpressions, eliminate_dead_code):
        graph = rewrite(graph, PLAIN)
    return graph


def fused(graph: Graph) -> Graph:
    return eliminate_dead_code(fuse(graph, PLAIN), PLAIN)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma2", {"rms_norm": 2 * 4 + 1}),
        ("gpt2", {"attention": 2, "gelu_tanh": 2}),
        ("gptj", {"attention": 2, "gelu_tanh": 2}),
        ("llama", {"rms_norm": 2 * 2 + 1, "attention": 2, "silu": 2}),
        ("phi3", {"rms_norm": 2 * 2 + 1, "attention": 2}),
        ("qwen3", {"rms_norm": 2 * 4 + 1, "attention": 2}),
        ("t5", {"attention": 2 + 2 * 2, "rms_norm": 2 * 2 + 2 * 3 + 2}),
        ("bloom", {"gelu_tanh": 2}),
    ],
)
def test_models_are_fused_and_answer_as_before(family: str, expected: dict[str, int]) -> None:
    wanted = request(family)
    before = prepared(captured(wanted))
    after = fused(before)
    found = Counter(node.op.label for node in after.nodes)
    assert {name: found[name] for name in expected} == expected
    assert not found["rsqrt"]
    parameters, inputs = weights(wanted), example_inputs(before, wanted.config, seed=1)
    answers = execute(after, parameters, inputs)
    for name, array in execute(before, parameters, inputs).items():
        assert relative_error(answers[name], array) < 3e-6 if array.any() else not answers[name].any()


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3"])
def test_attention_reads_each_key_head_once(family: str) -> None:
    graph = unroll(run_passes(captured(request(family)), PLAIN))
    heads = [node.operands[1].type.shape[1] for node in graph.nodes if isinstance(node.op, Attention)]
    assert heads == [2, 2]
    assert not any(isinstance(node.op, Broadcast) and node.op.shape[1:3] == (2, 4) for node in graph.nodes)


def rms(builder: GraphBuilder, x: Value, squared: Value, epsilon: float = 1e-6) -> Value:
    mean = builder.add(Reduce("mean", (1,), keep=True), builder.add(Binary("multiply"), squared, squared))
    inverse = builder.add(Unary("rsqrt"), builder.add(Binary("add"), mean, builder.scalar(epsilon)))
    return builder.add(Binary("multiply"), x, inverse)


def labels(graph: Graph) -> list[str]:
    return [node.op.label for node in graph.nodes]


def test_a_norm_by_another_tensors_mean_square_is_left_alone() -> None:
    builder = GraphBuilder()
    x, y = (builder.input(name, TensorType((2, 3), F32)) for name in "xy")
    builder.output("own", rms(builder, x, x))
    builder.output("other", rms(builder, x, y))
    assert sorted(labels(fused(builder.build()))) == sorted(
        ["rms_norm", "multiply", "mean", "add", "rsqrt", "multiply"]
    )


def test_a_norm_keeps_its_epsilon_and_takes_a_scale_of_one_row_only() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3), F32))
    row = builder.parameter("row", TensorType((3,), F32))
    full = builder.parameter("full", TensorType((2, 3), F32))
    norm = rms(builder, x, x, 0.25)
    builder.output("row", builder.add(Binary("multiply"), row, norm))
    builder.output("full", builder.add(Binary("multiply"), norm, full))
    nodes = fused(builder.build()).nodes
    assert [(node.op.label, len(node.operands)) for node in nodes] == [
        ("rms_norm", 1),
        ("rms_norm", 2),
        ("multiply", 2),
    ]
    assert {node.op for node in nodes if isinstance(node.op, RmsNorm)} == {RmsNorm(1, 0.25)}


def attention(mask_value: float, out: DType = F32) -> Graph:
    """Attention written out, with a mask of this number."""
    builder = GraphBuilder()
    q, k, v = (builder.input(name, TensorType((1, 2, 3, 4), F32)) for name in "qkv")
    product = builder.add(MatMul(out), q, builder.add(Transpose((0, 1, 3, 2)), k))
    scores = builder.add(Binary("divide"), product, builder.scalar(2.0))
    mask = builder.constant(np.triu(np.full((3, 3), mask_value), 1), F32)
    masked = builder.add(Binary("add"), scores, mask)
    builder.output("y", builder.add(MatMul(F32), builder.add(Softmax(3, log=False), masked), v))
    return builder.build()


def test_attention_written_out_becomes_one_operator_with_the_same_answer() -> None:
    before = attention(-1e9)
    after = fused(before)
    assert [node.op for node in after.nodes] == [Attention(scale=0.5, causal=False, probabilities=F32, out=F32)]
    generator = np.random.default_rng(0)
    inputs = {name: generator.standard_normal((1, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    answers = [execute(graph, {}, inputs)["y"] for graph in (before, after)]
    assert relative_error(answers[1], answers[0]) < 1e-6


def test_attention_whose_scores_were_rounded_on_the_way_is_left_alone() -> None:
    assert "attention" not in labels(fused(attention(-1e9, DType.BFLOAT16)))


def test_a_row_that_may_look_nowhere_keeps_attention_written_out() -> None:
    builder = GraphBuilder()
    q = builder.input("q", TensorType((1, 2, 3, 4), F32))
    product = builder.add(MatMul(F32), q, builder.add(Transpose((0, 1, 3, 2)), q))
    nowhere = builder.constant(np.full((3, 3), -np.inf), F32)
    soft = builder.add(Softmax(3, log=False), builder.add(Binary("add"), product, nowhere))
    builder.output("y", builder.add(MatMul(F32), soft, q))
    graph = builder.build()
    inputs = {"q": np.ones((1, 2, 3, 4), np.float32)}
    assert np.isnan(execute(fused(graph), {}, inputs)["y"]).all()


def test_heads_that_are_tiled_and_not_repeated_are_left_alone() -> None:
    builder = GraphBuilder()
    q = builder.input("q", TensorType((1, 4, 3, 2), F32))
    k = builder.input("k", TensorType((1, 2, 3, 2), F32))
    tiled = builder.add(Broadcast((1, 2, 2, 3, 2)), builder.add(Reshape((1, 1, 2, 3, 2)), k))
    heads = builder.add(Reshape((1, 4, 3, 2)), tiled)
    op = Attention(scale=1.0, causal=False, probabilities=F32, out=F32)
    builder.output("y", builder.add(op, q, heads, heads))
    assert fused(builder.build()).nodes[-1].operands[1].type.shape == (1, 4, 3, 2)


@pytest.mark.parametrize(("shape", "count"), [((5,), 1), ((1, 5), 2), ((2, 5), 2)])
def test_only_a_row_is_a_bias(shape: tuple[int, ...], count: int) -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3), F32))
    product = builder.add(Linear(F32), x, builder.parameter("w", TensorType((5, 3), F32)))
    builder.output("y", builder.add(Binary("add"), builder.parameter("b", TensorType(shape, F32)), product))
    assert len(fused(builder.build()).nodes) == count


@pytest.mark.parametrize(("factor", "name"), [(0.044715, "gelu_tanh"), (0.05, "multiply")])
def test_an_activation_with_other_numbers_is_another_activation(factor: float, name: str) -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3,), F32))

    def combine(function: str, value: Value, number: float) -> Value:
        return builder.add(Binary(function), value, builder.scalar(number))

    cubic = builder.add(Binary("add"), x, combine("multiply", combine("power", x, 3.0), factor))
    rest = combine("add", builder.add(Unary("tanh"), combine("multiply", cubic, 0.7978845608028654)), 1.0)
    builder.output("y", builder.add(Binary("multiply"), combine("multiply", x, 0.5), rest))
    assert labels(fused(builder.build()))[-1] == name
