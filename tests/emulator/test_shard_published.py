"""Published tensor-parallel plans: followed if possible, else the reason is reported."""

import re
from typing import Any

import pytest

from nxpipe.emulator.capture import CaptureRequest, example_inputs
from nxpipe.emulator.capture.model import published_plan
from nxpipe.emulator.compile import compile_program
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.shard import divide, plan
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks, execute
from tests.emulator.divided_models import GROUPED, lowered, request, worst_error
from tests.emulator.models import captured, weights

_MANY_EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PUBLISHING: dict[str, dict[str, Any]] = {
    "cohere": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "glm4": GROUPED,
    "gpt_neox": GROUPED,
    "llama": GROUPED,
    "mistral": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4},
    "olmo2": GROUPED,
    "phi": GROUPED | {"num_key_value_heads": 8},
    "phi3": GROUPED,
    "qwen2": GROUPED,
    "qwen2_moe": _MANY_EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3": GROUPED,
    "qwen3_moe": _MANY_EXPERTS,
    "starcoder2": GROUPED,
}
# OLMo 2 norms all heads of a query together, which needs them on one rank.
NOT_FOLLOWED = {"olmo2": ("q_proj", "k_proj", "v_proj", "o_proj")}


def of_class(family: str) -> CaptureRequest:
    config = {"model_type": family, **PUBLISHING[family]}
    return CaptureRequest(config, "text-generation", "prefill", 2, 10, "float32")


def rolled(wanted: CaptureRequest) -> Graph:
    graph = run_passes(captured(wanted), PassOptions())
    assert graph.repeats
    return graph


@pytest.mark.sample(16)
@pytest.mark.parametrize("family", PUBLISHING)
def test_a_published_plan_is_followed_and_ranks_answer_as_one_does(family: str) -> None:
    wanted = of_class(family)
    program = compile_program(wanted, PassOptions(tensor_parallel=4))
    division = divide(lowered(wanted), dict(published_plan(wanted)))
    assert program.parameters == division.plan(4).parameters
    entries = [sentence.partition(" is published as ")[0] for sentence in division.unmet]
    assert tuple(sorted(entry.rpartition(".")[2] for entry in entries)) == tuple(sorted(NOT_FOLLOWED.get(family, ())))
    parameters = weights(wanted)
    inputs = example_inputs(program.whole, wanted.config, seed=3)
    expected = execute(program.whole, parameters, inputs)
    assert worst_error(LoadedProgram(program, LoadedRanks(program.graph, parameters)).run(inputs), expected) < 3e-6


def test_an_entry_that_cannot_be_followed_is_told_with_the_line_that_stands_against_it() -> None:
    wanted = of_class("olmo2")
    unmet = divide(lowered(wanted), dict(published_plan(wanted))).unmet
    (query,) = [sentence for sentence in unmet if "q_proj is published as colwise_gather_output" in sentence]
    assert re.search(r"q_proj\.weight stays whole: rms_norm .*q_norm .*\.py:\d+ needs the whole result", query)
    assert divide(lowered(wanted)).unmet == ()


def test_an_entry_that_divides_the_other_way_is_told() -> None:
    graph = lowered(request("llama"))
    published = {"layers.*.mlp.up_proj": "rowwise", "layers.*.mlp.gate_proj": "colwise"}
    (sentence,) = divide(graph, published).unmet
    assert sentence.startswith("layers.*.mlp.up_proj is published as rowwise, but model.layers.0.mlp.up_proj.weight")


def test_a_published_plan_says_what_may_be_divided() -> None:
    graph = lowered(request("llama"))
    published = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "lm_head": "colwise_gather_output",
    }
    divided = set(plan(graph, 2, published).parameters)
    assert {"model.layers.1.mlp.down_proj.weight", "lm_head.weight"} <= divided
    assert not any("self_attn" in name for name in divided)


@pytest.mark.parametrize("family", ["gemma2", "llama", "mixtral", "phi3", "qwen3"])
def test_what_is_derived_from_the_graph_is_what_the_authors_published(family: str) -> None:
    wanted = request(family)
    graph, published = lowered(wanted), dict(published_plan(wanted))
    derived, followed = plan(graph, 2).parameters, plan(graph, 2, published).parameters
    assert derived == followed
    agreed = 0
    for pattern, style in published.items():
        if style.startswith("replicated"):
            continue
        for name in graph.parameters:
            if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+") + r"(\.weight)?", name):
                rows = graph.parameters[name].type.rank - (1 if "row" in style and "embedding" not in style else 2)
                assert derived[name].axis == rows
                agreed += 1
    assert agreed >= 2 * 4


def test_the_same_plan_whether_layers_are_stored_once_or_each() -> None:
    wanted = request("mixtral")
    published = dict(published_plan(wanted))
    assert divide(rolled(wanted), published).plan(2).parameters == divide(lowered(wanted), published).plan(2).parameters


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_what_is_not_followed_is_told_once_however_layers_are_stored(family: str) -> None:
    wanted = of_class(family)
    published = dict(published_plan(wanted))
    stored_once, each = (divide(graph, published).unmet for graph in (rolled(wanted), lowered(wanted)))
    assert stored_once == each
