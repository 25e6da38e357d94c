"""Degrees that do not divide a model: heads, widths and vocabularies are padded, without a change of outputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxpipe.emulator.analysis.graph_memory import footprints
from nxpipe.emulator.compile import emit, shard_graph
from nxpipe.emulator.errors import IllTyped
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Binary, Linear, Operator, RankSlice, Reduce, Reshape, RmsNorm, Softmax, Unary, Where
from nxpipe.emulator.ops.collective import Share, stretches, uneven
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.shard import NO_PADDING, DegreeImpossible, Sharding, padding, plan
from nxpipe.emulator.run.fast import LoadedProgram, execute
from nxpipe.emulator.run.isa import Isa
from tests.emulator.divided_models import arguments, blank_states, lowered, request, together, worst_error
from tests.emulator.models import captured, weights
from tests.tiers import examples

F32 = DType.FLOAT32
DRAWN = ["bert", "bloom", "gemma2", "gpt2", "llama", "mixtral", "phi3", "qwen3", "t5"]
several = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(several, max_examples=examples(200))


def sizes(family: str, heads: int, keys: int, inner: int, vocabulary: int) -> dict[str, Any]:
    """The sizes under the names of each family."""
    hidden, words = 4 * heads, {"vocab_size": vocabulary}
    if family == "t5":
        return words | {"d_model": hidden, "num_heads": heads, "d_ff": inner, "num_layers": 1}
    if family == "gpt2":
        return words | {"n_embd": hidden, "n_head": heads, "n_inner": inner, "n_layer": 1}
    if family == "bloom":
        return words | {"hidden_size": hidden, "n_head": heads, "n_layer": 1}
    named = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": inner, "num_hidden_layers": 1}
    return words | named | ({} if family == "bert" else {"num_key_value_heads": keys})


def any_model(test: Any) -> Any:
    return given(
        family=st.sampled_from(DRAWN),
        phase=st.sampled_from(["prefill", "decode"]),
        keys=st.integers(1, 6),
        group=st.integers(1, 5),
        inner=st.integers(1, 40),
        vocabulary=st.integers(5, 101),
        degree=st.integers(2, 12),
        tied=st.booleans(),
    )(test)


def agrees(
    family: str, phase: str, keys: int, group: int, inner: int, vocabulary: int, degree: int, tied: bool
) -> None:
    changes = sizes(family, keys * group, keys, inner, vocabulary)
    wanted = request(family, phase, tie_word_embeddings=tied, **changes)
    alone = lowered(wanted)
    if plan(alone, degree).refusal is not None:
        assert degree > min(keys * group, inner)
        return
    parameters, inputs = weights(wanted), arguments(alone, wanted) | blank_states(alone)
    assert worst_error(together(alone, parameters, inputs, degree), execute(alone, parameters, inputs)) < 3e-6


@pytest.mark.sample(4)
@any_model
@several
def test_any_number_of_heads_features_and_words_is_shared_by_any_number_of_ranks(**drawn: Any) -> None:
    agrees(**drawn)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@any_model
@many
def test_two_hundred_models_are_shared_by_any_number_of_ranks(**drawn: Any) -> None:
    agrees(**drawn)


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", ["bloom", "llama", "phi3"])
def test_padded_ranks_keep_their_part_of_a_cache(family: str) -> None:
    """States go from a prefill to a decode, whole in between: what is padding in them is neither given nor taken."""
    wanted = request(family)
    prefill, decode, parameters = lowered(wanted), lowered(request(family, "decode")), weights(wanted)
    inputs = arguments(prefill, wanted) | blank_states(prefill)
    filled = execute(prefill, parameters, inputs)
    on_ranks = together(prefill, parameters, inputs, 3)
    step = {name: array for name, array in arguments(decode, wanted).items() if name not in filled}
    after, expected = (
        {name: array for name, array in states.items() if name in decode.inputs} for states in (on_ranks, filled)
    )
    found = together(decode, parameters, step | after, 3)
    assert worst_error(found, execute(decode, parameters, step | expected)) < 3e-6


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "phase", "degree", "core"),
    [
        ("llama", "decode", 3, "v2"),
        ("phi3", "prefill", 5, "v3"),
        pytest.param("gpt2", "decode", 3, "v2", marks=pytest.mark.slow),
        pytest.param("llama", "prefill", 6, "v3", marks=pytest.mark.slow),
        pytest.param("mixtral", "decode", 3, "v3", marks=pytest.mark.slow),
        pytest.param("t5", "forward", 3, "v3", marks=pytest.mark.slow),
    ],
)
def test_instructions_of_padded_ranks_answer_as_one_rank_does(family: str, phase: str, degree: int, core: str) -> None:
    wanted = request(family, phase, vocab_size=97)
    alone, parameters = lowered(wanted), weights(wanted)
    inputs = arguments(alone, wanted) | blank_states(alone)
    program = shard_graph(alone, PassOptions(tensor_parallel=degree))
    found = LoadedProgram(program, Isa(emit(program, core)).load(parameters)).run(inputs)
    assert worst_error(found, execute(alone, parameters, inputs)) < 1e-5


def share_of(graph: Graph, name: str, degree: int) -> Share:
    (share,) = plan(graph, degree).parameters[name].shares
    return share


def test_each_key_head_has_as_many_ranks_and_its_query_heads_are_padded_there() -> None:
    """As 64 and 8 heads on 24 ranks: 3 query heads of each rank, the last of every third one padding."""
    graph = lowered(request("llama", num_attention_heads=16, num_key_value_heads=2, hidden_size=64))
    layer = "model.layers.0.self_attn."
    assert share_of(graph, f"{layer}q_proj.weight", 6) == Share(64, 2, 1, 3 * 4)
    assert share_of(graph, f"{layer}k_proj.weight", 6) == Share(8, 2, 1, 4)
    output = plan(graph, 6).parameters[f"{layer}o_proj.weight"]
    assert (output.axis, output.shares) == (1, (Share(64, 2, 1, 3 * 4),))
    heads = [[stretch.size // 4 for stretch in stretches(output.shares, rank, 6)] for rank in range(6)]
    assert heads == [[3], [3], [2], [3], [3], [2]]


def test_a_copy_of_key_heads_is_preferred_to_many_query_heads_of_padding() -> None:
    """As 64 and 8 heads on 12 ranks: two key heads each, with 3 query heads, where one would serve 8."""
    graph = lowered(request("llama", num_attention_heads=64, num_key_value_heads=8, hidden_size=64, head_dim=2))
    query, key = (share_of(graph, f"model.layers.0.self_attn.{name}_proj.weight", 12) for name in "qk")
    assert (query.slots, query.length, key.slots, key.length) == (2, 3 * 2, 2, 2)
    assert padding(graph, plan(graph, 12)).work < 0.15


def test_a_vocabulary_and_a_width_are_padded_at_their_end() -> None:
    graph = lowered(request("llama", vocab_size=101, intermediate_size=47))
    assert share_of(graph, "model.embed_tokens.weight", 2) == Share(101, 1, 1, 51)
    assert share_of(graph, "model.layers.1.mlp.up_proj.weight", 4) == Share(47, 1, 1, 12)
    assert plan(graph, 2).parameters["model.layers.1.mlp.down_proj.weight"].axis == 1


def test_work_that_need_not_be_shared_stays_whole_if_ranks_would_have_nothing_but_padding() -> None:
    graph = lowered(request("llama", vocab_size=9))
    assert "lm_head.weight" in plan(graph, 5).parameters
    assert "lm_head.weight" not in plan(graph, 8).parameters


@given(
    degree=st.integers(2, 7),
    parts=st.integers(1, 9),
    slots=st.integers(1, 9),
    group=st.integers(0, 4),
    length=st.integers(0, 4),
)
@settings(deadline=None, max_examples=examples(300))
def test_every_element_has_a_rank_or_the_share_is_refused(
    degree: int, parts: int, slots: int, group: int, length: int
) -> None:
    share = Share(parts * group, parts, slots, length)
    rooms = uneven((share,), degree)
    if not share.is_possible(degree):
        with pytest.raises(IllTyped, match="cannot be divided into"):
            RankSlice(0, 1, (share.size,), (parts,), degree, *rooms).infer(TensorType((share.size,), F32))
        return
    piece, whole = Sharding(0, (share.size,), (parts,), *rooms), np.arange(1.0, share.size + 1)
    shares = piece.split(whole, degree)
    assert {len(entry) for entry in shares} == {share.local}
    assert set(np.concatenate(shares)) - {0.0} == set(whole)
    assert np.array_equal(piece.joined(shares), whole)


def test_equal_shares_have_one_spelling() -> None:
    with pytest.raises(IllTyped, match="cannot be divided into"):
        RankSlice(0, 1, (8,), (2,), 2, (1,), (4,)).infer(TensorType((8,), F32))


def between(work: Callable[[GraphBuilder, Value], Value]) -> Graph:
    """An operation between two layers whose 6 features are sharded."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3, 5), F32))
    hidden = builder.add(Linear(F32), x, builder.parameter("up", TensorType((6, 5), F32)))
    hidden = work(builder, hidden)
    if hidden.type.rank > 1:
        hidden = builder.add(Linear(F32), hidden, builder.parameter("down", TensorType((5, 6), F32)))
    builder.output("y", hidden)
    return builder.build()


def of(*operators: Operator) -> Callable[[GraphBuilder, Value], Value]:
    def work(builder: GraphBuilder, value: Value) -> Value:
        for operator in operators:
            value = builder.add(operator, value)
        return value

    return work


def by_its_size(epsilon: float) -> Callable[[GraphBuilder, Value], Value]:
    """Each pair of features divided by its length."""

    def work(builder: GraphBuilder, value: Value) -> Value:
        heads = builder.add(Reshape((3, 6, 1)), value)
        square = builder.add(Binary("multiply"), heads, heads)
        mean = builder.add(Reduce("mean", (2,), keep=True), square)
        shifted = builder.add(Binary("add"), mean, builder.scalar(epsilon, F32))
        scaled = builder.add(Binary("multiply"), heads, builder.add(Unary("rsqrt"), shifted))
        return builder.add(Reshape((3, 6)), scaled)

    return work


def chosen(builder: GraphBuilder, value: Value) -> Value:
    """The reciprocal, if it exists."""
    zero = builder.scalar(0.0, F32)
    there = builder.add(Binary("greater"), builder.add(Unary("abs"), value), zero)
    return builder.add(Where(), there, builder.add(Unary("reciprocal"), value), zero)


def normed(epsilon: float) -> Callable[[GraphBuilder, Value], Value]:
    return of(Reshape((3, 6, 1)), RmsNorm(1, epsilon), Reshape((3, 6)))


@pytest.mark.parametrize(
    "work",
    [
        of(Unary("cos"), Unary("exp")),
        of(Reshape((3, 6, 1)), Softmax(2, log=False), Reshape((3, 6))),
        of(Unary("sin"), Reduce("sum", (1,), keep=False)),
        by_its_size(1e-6),
        normed(1e-6),
        chosen,
    ],
)
def test_zeros_that_become_something_finite_do_no_harm(work: Callable[[GraphBuilder, Value], Value]) -> None:
    graph = between(work)
    generator = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        name: generator.standard_normal(value.type.shape).astype(np.float32)
        for side in (graph.parameters, graph.inputs)
        for name, value in side.items()
    }
    x = {"x": arrays.pop("x")}
    for degree in (4, 5):
        assert worst_error(together(graph, arrays, x, degree), execute(graph, arrays, x)) < 3e-6


@pytest.mark.parametrize(
    "work",
    [
        of(Unary("reciprocal")),
        of(Unary("cos"), Unary("log"), Unary("rsqrt")),
        of(Unary("cos"), Reduce("sum", (1,), keep=False)),
        by_its_size(0.0),
        normed(0.0),
    ],
)
def test_a_degree_at_which_zeros_would_reach_a_sum_is_refused(work: Callable[[GraphBuilder, Value], Value]) -> None:
    graph = between(work)
    with pytest.raises(DegreeImpossible, match=r"shared by 4 ranks, nor padded: .*sum.*; degrees that work: 1 to 3, 6"):
        shard_graph(graph, PassOptions(tensor_parallel=4))
    assert shard_graph(graph, PassOptions(tensor_parallel=3)).padding == NO_PADDING


def test_what_padding_costs_is_counted() -> None:
    """Six features on four ranks: two each, so that a quarter of all is padding, a third more than there was."""
    graph = between(of(Unary("tanh")))
    cost = padding(graph, plan(graph, 4))
    assert cost.held == cost.work == pytest.approx(1 / 3)
    assert str(cost) == "33.3% more multiply-adds, 33.3% more bytes of weights and states"
    assert not padding(graph, plan(graph, 3))


def test_the_cost_is_the_same_however_layers_are_stored() -> None:
    rolled = run_passes(captured(request("llama")), PassOptions())
    assert rolled.repeats
    alone = lowered(request("llama"))
    ((one,), _), ((all_layers,), _) = footprints([rolled], [3]), footprints([alone], [3])
    assert (
        one.padding.held == pytest.approx(all_layers.padding.held) == pytest.approx(padding(alone, plan(alone, 3)).held)
    )
    assert one.padding.work == pytest.approx(all_layers.padding.work)
    assert one.padding.work > 0.05
