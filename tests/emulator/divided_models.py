"""Small models that can be sharded, and the combined outputs of all ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nxpipe.emulator.capture import CaptureRequest, example_inputs
from nxpipe.emulator.compile import shard_graph
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks
from tests.emulator.models import captured, relative_error

_WORDS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DEEP = {"num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 48, "max_position_embeddings": 64}
_ENCODER = _WORDS | _DEEP | {"hidden_size": 32}
GROUPED = _ENCODER | {"num_key_value_heads": 2, "head_dim": 4}
_GPT = _WORDS | {"n_embd": 32, "n_layer": 2, "n_head": 8, "n_positions": 64}
_T5 = {"d_model": 32, "d_kv": 4, "d_ff": 48, "num_layers": 2, "num_heads": 8, "decoder_start_token_id": 0}

# Distinct features by family: grouped heads, fused projections, bias tables, soft caps, no bias.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("feature-extraction", _ENCODER),
    "bloom": ("text-generation", _WORDS | {"hidden_size": 32, "n_layer": 2, "n_head": 8}),
    "falcon": ("text-generation", _ENCODER),
    "gemma2": ("text-generation", GROUPED),
    "gpt2": ("text-generation", _GPT),
    "gpt_neox": ("text-generation", _ENCODER),
    "gptj": ("text-generation", _GPT | {"rotary_dim": 4}),
    "llama": ("text-generation", GROUPED),
    "mixtral": ("text-generation", GROUPED | {"num_local_experts": 4}),
    "phi3": ("text-generation", GROUPED),
    "qwen3": ("text-generation", GROUPED),
    "t5": ("feature-extraction", _WORDS | _T5),
}


def request(family: str, phase: str = "prefill", dtype: str = "float32", **changes: Any) -> CaptureRequest:
    task, config = FAMILIES[family]
    phase = phase if task == "text-generation" else "forward"
    return CaptureRequest({"model_type": family, **config, **changes}, task, phase, 2, 10, dtype)


def lowered(wanted: CaptureRequest, degree: int = 1) -> Graph:
    return unroll(run_passes(captured(wanted), PassOptions(tensor_parallel=degree)))


def arguments(graph: Graph, wanted: CaptureRequest) -> dict[str, Array]:
    """Random ids whose last sequence is shorter; the ranks create their states."""
    inputs = example_inputs(graph, wanted.config, seed=3)
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -3:] = 0
    return inputs


def blank_states(graph: Graph) -> dict[str, Array]:
    carried = graph.inputs.keys() & graph.outputs.keys()
    return {name: np.zeros(graph.inputs[name].type.shape, np.float32) for name in carried}


def together(
    whole: Graph, parameters: Mapping[str, Array], inputs: Mapping[str, Array], degree: int
) -> dict[str, Array]:
    """All outputs of a graph, computed by so many ranks."""
    program = shard_graph(whole, PassOptions(tensor_parallel=degree))
    return LoadedProgram(program, LoadedRanks(program.graph, parameters)).run(inputs)


def worst_error(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    assert found.keys() == expected.keys()
    return max(relative_error(found[name], expected[name]) for name in expected)


def execute_ranks(graph: Graph, parameters: Mapping[str, Array], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a sharded graph without states, by name."""
    return LoadedRanks(graph, parameters).run(inputs)[0]
