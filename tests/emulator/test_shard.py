"""Tensor parallelism: all ranks together give the unsharded outputs, and each holds its share."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.capture import example_inputs
from nxpipe.emulator.errors import ExecutionError, IllTyped
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import AllGather, AllReduce, Binary, Linear, RankSlice, Unary
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.shard import DegreeImpossible, Division, divide, plan
from nxpipe.emulator.passes.shard.apply import merge_sums
from nxpipe.emulator.passes.shard.plan import ShardPlan
from nxpipe.emulator.run.fast import LoadedRanks, execute
from tests.emulator.divided_models import (
    FAMILIES,
    arguments,
    blank_states,
    execute_ranks,
    lowered,
    request,
    together,
    worst_error,
)
from tests.emulator.models import captured, relative_error, weights

F32 = DType.FLOAT32


def run_on_ranks(
    graph: Graph, parameters: Mapping[str, Array], inputs: Mapping[str, Array]
) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    blank = blank_states(graph)
    given_to_all = {name: array for name, array in inputs.items() if name not in blank}
    ranks = LoadedRanks(graph, parameters)
    return ranks.run(given_to_all, [blank] * ranks.degree)


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degree", [2, 5, 8])
def test_ranks_together_answer_as_one_does(family: str, degree: int) -> None:
    wanted = request(family)
    parameters, alone = weights(wanted), lowered(wanted)
    inputs = arguments(alone, wanted)
    expected = execute(alone, parameters, inputs | blank_states(alone))
    found, _ = run_on_ranks(lowered(wanted, degree), parameters, inputs)
    assert found
    for name in found:
        assert relative_error(found[name], expected[name]) < 3e-6


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_the_layers_is_divided(family: str) -> None:
    graph = lowered(request(family))
    divided = plan(graph, 2).parameters
    matrices = {name for name, value in graph.parameters.items() if value.type.rank > 1}
    small = ("position", "wpe", "type_emb", "relative", "mlp.gate.")  # tables of places, and what chooses experts
    assert {name for name in matrices if not any(word in name for word in small)} <= divided.keys()


def bytes_per_rank(division: ShardPlan, graph: Graph) -> int:
    """The weights of each rank; all ranks hold equally many bytes."""
    return sum(division.local(name, value.type).nbytes for name, value in graph.parameters.items())


@pytest.mark.parametrize("family", ["falcon", "llama", "t5"])
def test_a_plan_says_what_the_program_then_loads(family: str) -> None:
    wanted = request(family)
    graph, sharded = lowered(wanted), lowered(wanted, 4)
    loaded = dict.fromkeys(sharded.parameters.values(), 0)
    for node in sharded.nodes:
        for operand in node.operands:
            if operand in loaded:
                sliced = isinstance(node.op, RankSlice)
                loaded[operand] = node.result.type.nbytes if sliced else operand.type.nbytes
    assert bytes_per_rank(plan(graph, 4), graph) == sum(loaded.values())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_plan_of_repeated_layers_is_the_plan_of_all_layers(family: str) -> None:
    rolled = run_passes(captured(request(family)), PassOptions())
    assert rolled.repeats
    for degree in (2, 4):
        stored, written_out = plan(rolled, degree), plan(unroll(rolled), degree)
        assert stored.parameters == written_out.parameters
        assert stored.states == written_out.states
        assert bytes_per_rank(stored, rolled) == bytes_per_rank(written_out, unroll(rolled))


def test_pieces_of_all_ranks_are_the_whole_weight() -> None:
    graph, weight = lowered(request("phi3")), np.arange(64.0)
    piece = plan(graph, 4).parameters["model.layers.0.self_attn.qkv_proj.weight"]
    assert (piece.sizes, piece.parts) == ((32, 8, 8), (4, 2, 2))
    cut = RankSlice(0, 1, piece.sizes, piece.parts, 4)
    shares = [cut.piece(weight[:48], rank) for rank in range(4)]
    assert [len(share) for share in shares] == [8 + 4 + 4] * 4
    assert sorted(set(np.concatenate(shares))) == list(range(48))
    assert np.array_equal(shares[0][8:], shares[1][8:])  # neighbours share a key head


def test_the_states_of_a_rank_hold_the_heads_that_it_serves() -> None:
    wanted = request("llama")
    parameters, alone = weights(wanted), lowered(wanted)
    inputs = arguments(alone, wanted)
    expected = execute(alone, parameters, inputs | blank_states(alone))
    whole = {name: expected[name] for name in blank_states(alone)}
    _, states = run_on_ranks(lowered(wanted, 4), parameters, inputs)
    for name, array in whole.items():
        for rank, mine in enumerate(states):
            assert relative_error(mine[name], array[:, rank // 2 : rank // 2 + 1]) < 3e-6  # two key heads, four ranks


def test_a_layer_is_two_exchanges_and_the_ends_are_one_each() -> None:
    collectives = Counter(type(node.op) for node in lowered(request("llama"), 2).nodes)
    assert collectives[AllReduce] == 2 * 2 + 1
    assert collectives[AllGather] == 1


@pytest.mark.parametrize("family", ["falcon", "gpt_neox", "gptj"])
def test_blocks_side_by_side_meet_once_a_layer(family: str) -> None:
    collectives = Counter(type(node.op) for node in lowered(request(family), 2).nodes)
    assert collectives[AllReduce] == 2 + 1


def test_sums_that_are_added_in_a_narrow_type_are_one_sum_too() -> None:
    wanted = request("falcon", dtype="bfloat16")
    parameters, alone = weights(wanted), lowered(wanted)
    assert sum(isinstance(node.op, AllReduce) for node in lowered(wanted, 4).nodes) == 2 + 1
    inputs = example_inputs(alone, wanted.config, seed=3)
    assert worst_error(together(alone, parameters, inputs, 4), execute(alone, parameters, inputs)) < 0.02


def test_a_sum_that_somebody_else_reads_is_not_merged() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3, 4), F32))
    sums = [builder.add(AllReduce(2), builder.add(Unary(name), x)) for name in ("sin", "cos")]
    builder.output("y", builder.add(Binary("add"), *sums))
    builder.output("sin", sums[0])
    graph = builder.build()
    assert merge_sums(graph).key == graph.key
    alone = replace(graph, outputs={"y": graph.outputs["y"]})
    assert [node.op.name for node in merge_sums(alone).nodes].count("all_reduce") == 1
    given_to_all = {"x": np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)}
    merged, apart = (execute_ranks(entry, {}, given_to_all)["y"] for entry in (merge_sums(alone), alone))
    assert relative_error(merged, apart) < 1e-6


def test_autocast_and_ranks_agree_with_autocast_alone() -> None:
    wanted, options = request("llama"), PassOptions("matmult", "bf16")
    parameters, alone = weights(wanted), run_passes(captured(wanted), options)
    inputs = arguments(alone, wanted)
    expected = execute(alone, parameters, inputs | blank_states(alone))["logits"]
    found, _ = run_on_ranks(run_passes(captured(wanted), replace(options, tensor_parallel=4)), parameters, inputs)
    assert relative_error(found["logits"], expected) < 0.02


@pytest.mark.parametrize(
    ("changes", "degree", "reason"),
    [
        ({}, 12, r"the 8 units of .* and the 2 key heads that serve them cannot be shared by 12 ranks; .*: 1 to 8$"),
        ({"intermediate_size": 3}, 4, r"the 3 units of model.layers.0.mlp.* by 4 ranks; degrees that work: 1 to 3$"),
    ],
)
def test_an_impossible_degree_is_refused_with_the_sizes_and_the_way_out(
    changes: dict[str, Any], degree: int, reason: str
) -> None:
    wanted = request("llama", **changes)
    with pytest.raises(DegreeImpossible, match=reason):
        lowered(wanted, degree)
    assert lowered(wanted, 1).parameters


def test_a_deep_model_stays_rolled_when_it_is_divided() -> None:
    graph = run_passes(captured(request("llama")), PassOptions(tensor_parallel=2))
    assert [repeat.count for repeat in graph.repeats] == [2]


def perceptron() -> Division:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((3, 6), F32))
    hidden = builder.add(Linear(F32), x, builder.parameter("up", TensorType((12, 6), F32)))
    builder.output("y", builder.add(Linear(F32), hidden, builder.parameter("down", TensorType((6, 12), F32))))
    return divide(builder.build())


def test_a_division_knows_every_degree_that_it_allows() -> None:
    assert perceptron().degrees() == list(range(1, 13))
    refusal = perceptron().plan(13).refusal
    assert str(refusal) == "the 12 units of up cannot be shared by 13 ranks; degrees that work: 1 to 12"


def test_two_runs_on_ranks_are_equal_to_the_bit() -> None:
    graph = run_passes(perceptron().graph, PassOptions(tensor_parallel=6))
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal(value.type.shape) for name, value in graph.parameters.items()}
    x = {"x": generator.standard_normal((3, 6))}
    first, again = execute_ranks(graph, arrays, x), execute_ranks(graph, arrays, x)
    assert np.array_equal(first["y"], again["y"])


def test_a_collective_cannot_be_computed_by_one_rank() -> None:
    graph = run_passes(perceptron().graph, PassOptions(tensor_parallel=2))
    arrays = {name: np.zeros(value.type.shape, np.float32) for name, value in graph.parameters.items()}
    with pytest.raises(ExecutionError, match="needs its 2 ranks; run the graph with"):
        execute(graph, arrays, {"x": np.zeros((3, 6), np.float32)})


def test_a_rank_that_fails_ends_the_others_and_its_fault_is_told() -> None:
    graph = run_passes(perceptron().graph, PassOptions(tensor_parallel=2))
    arrays = {name: np.zeros(value.type.shape, np.float32) for name, value in graph.parameters.items()}
    with pytest.raises(ExecutionError, match="input 'x'"):
        execute_ranks(graph, arrays, {})


def test_a_sharded_graph_survives_its_bytes() -> None:
    graph = lowered(request("falcon"), 2)
    assert decode(graph.to_bytes()).key == graph.key


@pytest.mark.parametrize(("axis", "parts", "degree"), [(0, 3, 6), (0, 2, 3), (1, 2, 2)])
def test_pieces_that_do_not_exist_are_refused(axis: int, parts: int, degree: int) -> None:
    with pytest.raises(IllTyped):
        RankSlice(axis, 1, (8,), (parts,), degree).infer(TensorType((8,), F32))


@given(
    outer=st.integers(1, 3),
    blocks=st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4])), min_size=1, max_size=3),
)
@settings(deadline=None)
def test_gathering_undoes_slicing(outer: int, blocks: list[tuple[int, int]]) -> None:
    sizes, parts = tuple(width * n for width, n in blocks), tuple(n for _, n in blocks)
    whole = TensorType((2, outer * sum(sizes)), F32)
    builder = GraphBuilder()
    x = builder.input("x", whole)
    share = builder.add(RankSlice(1, outer, sizes, parts, 4), x)
    builder.output("y", builder.add(AllGather(1, outer, sizes, parts, 4), share))
    array = np.arange(whole.elements, dtype=np.float32).reshape(whole.shape)
    assert np.array_equal(execute_ranks(builder.build(), {}, {"x": array})["y"], array)
