"""Fast capture of deep models: the result is that of the full capture, or a full capture is made."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from torch.nn import ModuleList
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from nxpipe.emulator.capture import CaptureRequest, capture
from nxpipe.emulator.capture.model import build_model
from nxpipe.emulator.capture.repeated_layers import compile_by_depth
from nxpipe.emulator.compile import compile_graph
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.passes import PassOptions, check, run_passes
from nxpipe.emulator.run.fast import execute

pytestmark = pytest.mark.sample(12)

MATMULT = PassOptions("matmult")
DEPTH = ("num_hidden_layers", "n_layer", "num_layers")  # as families call it

_IDS = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TINY = _IDS | {
    "hidden_size": 32,
    "num_hidden_layers": 8,  # the fewest for which two shallow captures are less work
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
_GPT2 = _IDS | {"model_type": "gpt2", "n_embd": 32, "n_layer": 8, "n_head": 4, "n_positions": 64}
_T5 = _IDS | {"model_type": "t5", "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 10}
_FALCON = {key: value for key, value in _TINY.items() if key != "head_dim"} | {"model_type": "falcon"}

_GPT_NEO = _IDS | {"model_type": "gpt_neo", "hidden_size": 32, "num_layers": 16, "num_heads": 4, "window_size": 6}
_GPT_NEO |= {"max_position_embeddings": 64, "attention_types": [[["global", "local"], 8]]}
_GEMMA3 = _TINY | {"model_type": "gemma3_text", "num_hidden_layers": 16, "sliding_window": 4}
_GEMMA3 |= {"layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 5, "sliding_attention"]}
_WAV2VEC2 = _TINY | {"model_type": "wav2vec2", "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
_WAV2VEC2 |= {
    "num_hidden_layers": 10,
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
_WHISPER = _IDS | {"model_type": "whisper", "d_model": 32, "encoder_layers": 8, "decoder_layers": 8}
_WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_WHISPER |= {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "decoder_start_token_id": 2}
_SWIN = {
    "model_type": "swin",
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 20],
    "num_heads": [2, 4],
}
_SWIN |= {"window_size": 4}
_CONVNEXT = {"model_type": "convnext", "image_size": 32, "depths": [2, 14], "num_stages": 2, "hidden_sizes": [8, 16]}

# Family, phase, and how many layers make one iteration.
DEEP: Mapping[str, tuple[dict[str, Any], str, int]] = {
    "llama prefill": (_TINY | {"model_type": "llama"}, "prefill", 1),
    "llama decode": (_TINY | {"model_type": "llama"}, "decode", 1),
    "mistral": (_TINY | {"model_type": "mistral", "sliding_window": 4}, "prefill", 1),
    "qwen3": (_TINY | {"model_type": "qwen3"}, "decode", 1),
    "gemma2": (_TINY | {"model_type": "gemma2", "sliding_window": 4, "num_hidden_layers": 14}, "forward", 2),
    "gemma2 of odd depth": (
        _TINY | {"model_type": "gemma2", "sliding_window": 4, "num_hidden_layers": 17},
        "decode",
        2,
    ),
    "gpt2": (_GPT2, "decode", 1),
    "bert": (_TINY | {"model_type": "bert"}, "forward", 1),
    "falcon": (_FALCON, "forward", 1),
    "qwen2 with a window that no layer has": (_TINY | {"model_type": "qwen2", "max_window_layers": 7}, "decode", 1),
    "gpt_neo": (_GPT_NEO, "decode", 2),
    "gemma3": (_GEMMA3, "prefill", 3),
    "wav2vec2": (_WAV2VEC2, "forward", 1),
    "whisper": (_WHISPER, "forward", 1),
    "swin, in one of its stages": (_SWIN, "forward", 2),
    "convnext, in one of its stages": (_CONVNEXT, "forward", 1),
    "vit": (_TINY | {"model_type": "vit", "image_size": 32, "patch_size": 8}, "forward", 1),
}


# One of each way to be deep; the others are of families that differ in what a layer does, not in how they stack.
DAILY = ("llama decode", "gemma2 of odd depth", "gpt2", "swin, in one of its stages")


def request(config: Mapping[str, Any], phase: str = "forward") -> CaptureRequest:
    task = "feature-extraction" if phase == "forward" else "text-generation"
    return CaptureRequest(config, task, phase, 2, 12, "float32")


@cache
def both_ways(name: str) -> tuple[Graph, Graph]:
    """The graph of the full capture, and the one extended from shallow captures."""
    wanted = request(*DEEP[name][:2])
    graph = compile_by_depth(wanted, lambda captured: run_passes(captured, MATMULT))
    assert graph is not None
    return run_passes(capture(wanted), MATMULT), graph


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "name", [name if name in DAILY else pytest.param(name, marks=pytest.mark.slow) for name in DEEP]
)
def test_the_lengthened_graph_is_the_full_capture(name: str) -> None:
    config, phase, period = DEEP[name]
    whole, graph = both_ways(name)
    check(graph, after="lengthening")
    assert graph.key == whole.key
    assert [graph.inputs.keys(), graph.outputs.keys()] == [whole.inputs.keys(), whole.outputs.keys()]
    assert graph.parameters.keys() == whole.parameters.keys()
    assert decode(graph.to_bytes()).key == whole.key
    layers = max(len(stack) for stack in build_model(request(config, phase)).modules() if isinstance(stack, ModuleList))
    assert max(repeat.count for repeat in graph.repeats) >= layers // period - 1


def test_provenance_counts_along() -> None:
    whole, graph = both_ways("gemma2 of odd depth")
    assert {node.origin for node in unroll(graph).nodes} == {node.origin for node in unroll(whole).nodes}


def layers_in(graph: Graph) -> int:
    """The number of layers of a captured graph, from the names of their weights."""
    return len({number[0] for name in graph.parameters if (number := re.search(r"\d+", name))})


Calls = Callable[[CaptureRequest], tuple[Graph, list[int]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Compile, and return the number of layers of each capture."""

    def compiled(wanted: CaptureRequest) -> tuple[Graph, list[int]]:
        depths = []

        def counted(graph: Graph, options: PassOptions) -> Graph:
            depths.append(layers_in(graph))
            return run_passes(graph, options)

        monkeypatch.setattr("nxpipe.emulator.compile.run_passes", counted)
        return compile_graph(wanted, PassOptions()), depths

    return compiled


def test_only_few_layers_of_a_deep_model_are_captured(calls: Calls) -> None:
    graph, depths = calls(request(_TINY | {"model_type": "llama", "num_hidden_layers": 500}))
    assert depths == [3, 2]
    assert graph.repeats[0].count == 500
    assert len(graph.to_bytes()) < 400_000


ODD = {
    "one sliding layer": _TINY
    | {
        "model_type": "qwen3",
        "sliding_window": 4,
        "use_sliding_window": True,
        "num_hidden_layers": 8,
        "layer_types": ["full_attention"] * 6 + ["sliding_attention"] + ["full_attention"],
    },
    "scores scaled by the layer's number": _GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "too few layers to save any": _TINY | {"model_type": "llama", "num_hidden_layers": 5},
}


@pytest.mark.parametrize("name", ODD)
def test_a_model_whose_layers_are_not_provably_equal_is_captured_whole(name: str, calls: Calls) -> None:
    wanted = request(ODD[name])
    _, depths = calls(wanted)
    assert depths[-1] == next(wanted.config[key] for key in DEPTH if key in wanted.config)


def test_a_setting_that_counts_other_layers_does_no_harm_while_nothing_asks_for_it(calls: Calls) -> None:
    wanted = request(_TINY | {"model_type": "qwen2", "max_window_layers": 5, "num_hidden_layers": 8})
    graph, depths = calls(wanted)
    assert max(depths) < 8
    assert graph.key == run_passes(capture(wanted), PassOptions()).key


def test_a_run_that_asks_which_layer_is_odd_is_captured_whole(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    """The sixth layer of nine doubles its result: its number stands in the configuration, not in its settings."""
    plain = LlamaDecoderLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        return 2 * result if self.self_attn.layer_idx == self.self_attn.config.odd_layer else result

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    wanted = request(_TINY | {"model_type": "llama", "num_hidden_layers": 9, "odd_layer": 5})
    _, depths = calls(wanted)
    assert depths[-1] == 9


def test_special_first_layers_stay_outside_of_the_repeat(calls: Calls) -> None:
    config = _TINY | {"model_type": "qwen3_moe", "num_hidden_layers": 11, "mlp_only_layers": [0]}
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    wanted = request(config | sizes)
    graph, depths = calls(wanted)
    assert max(depths) < 11
    assert graph.key == run_passes(capture(wanted), PassOptions()).key


def test_a_lengthened_graph_runs_like_the_full_capture() -> None:
    whole, graph = both_ways("gemma2 of odd depth")
    generator = np.random.default_rng(0)
    parameters, inputs = (
        {
            name: np.ones(value.type.shape, np.int64)
            if value.type.dtype.is_integer
            else generator.standard_normal(value.type.shape).astype(np.float32) / 8
            for name, value in side.items()
        }
        for side in (whole.parameters, whole.inputs)
    )
    expected, found = execute(whole, parameters, inputs), execute(graph, parameters, inputs)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_shallow_capture_that_fails_leaves_the_word_to_the_full_one() -> None:
    def fails(captured: Graph) -> Graph:
        raise CaptureError(f"no {layers_in(captured)} layers")

    assert compile_by_depth(request(_TINY | {"model_type": "llama", "num_hidden_layers": 9}), fails) is None


def test_both_stacks_of_an_encoder_decoder_grow(calls: Calls) -> None:
    wanted = request(_T5)
    graph, depths = calls(wanted)
    assert max(depths) < 10
    assert graph.key == run_passes(capture(wanted), PassOptions()).key
