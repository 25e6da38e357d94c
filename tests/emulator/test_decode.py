"""Decoders step by step: compiled prefill and decode programs compared with PyTorch's generation of the same text."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from nxpipe.emulator.capture import CaptureRequest, capture, example_inputs, parameter_specs, reference_outputs
from nxpipe.emulator.errors import CaptureError, IndexOutOfRange
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import LoadedGraph
from tests.emulator.models import captured, relative_error

PROMPTS, STEPS, CAPACITY, CHUNK = (9, 5), 8, 20, 4  # two rows whose prompts differ in length
_TINY = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_LLAMA = _TINY | _SHAPE | {"max_position_embeddings": 64, "num_key_value_heads": 2}
_GPT = _TINY | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GEMMA = _LLAMA | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}

DECODERS: dict[str, dict[str, Any]] = {
    "bloom": _TINY | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _TINY | _SHAPE | {"multi_query": True, "new_decoder_architecture": False},
    "falcon alibi": _TINY | _SHAPE | {"alibi": True, "multi_query": False},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA | {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT | {"multi_query": True},
    "gpt_neo": _TINY
    | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64, "window_size": 4}
    | {"attention_types": [[["global", "local"], 1]]},
    "gpt_neox": _TINY | _SHAPE | {"max_position_embeddings": 64},
    "gptj": _GPT | {"rotary_dim": 4},
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 4},
    "mpt": _TINY | {"d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64},
    "opt": _TINY | _SHAPE | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 16},
    "stablelm": _LLAMA,
    "starcoder2": _LLAMA | {"sliding_window": None},
}


def request(name: str, phase: str, batch: int = 2, **changes: Any) -> CaptureRequest:
    config = {"model_type": name.split()[0], **DECODERS[name]}
    capacity = CAPACITY if phase in ("prefill", "extend") else None
    sequence = {"prefill": max(PROMPTS), "extend": CHUNK}.get(phase, CAPACITY)
    fields: dict[str, Any] = {"sequence": sequence, "capacity": capacity, "dtype": "float32"}
    return CaptureRequest(config, "text-generation", phase, batch, **(fields | changes))


@cache
def weights(name: str) -> dict[str, Array]:
    generator = np.random.default_rng(5)
    made = {}
    for parameter, type_ in parameter_specs(request(name, "decode")).items():
        noise = 0.15 * generator.standard_normal(type_.shape).astype(np.float32)
        gain = "norm" in parameter or ".ln_" in parameter
        made[parameter] = 1 + noise if gain and parameter.endswith("weight") and "gemma" not in name else noise
    return made


@cache
def compiled(name: str, phase: str) -> LoadedGraph:
    return LoadedGraph(run_passes(captured(request(name, phase)), PassOptions()), weights(name))


def prompts() -> tuple[Array, Array]:
    """Random ids and their mask, padded on the right."""
    mask = (np.arange(max(PROMPTS)) < np.asarray(PROMPTS)[:, None]).astype(np.int64)
    ids = np.random.default_rng(1).integers(3, 101, mask.shape)
    return np.where(mask == 1, ids, 0), mask


def in_pytorch(name: str) -> Any:
    """The same model with the same weights in PyTorch."""
    wanted = request(name, "forward", 1, sequence=1)
    config = transformers.AutoConfig.for_model(name.split()[0], **DECODERS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert wanted.config["model_type"] == config.model_type
    found = model.load_state_dict({k: torch.from_numpy(v) for k, v in weights(name).items()}, strict=False)
    assert not found.unexpected_keys
    model.tie_weights()
    return model


def generated_by_pytorch(model: Any, prompt: Array) -> list[Array]:
    """The logits of each step of greedy generation, each from a full forward pass without a cache."""
    tokens, logits = torch.from_numpy(prompt)[None], []
    for _ in range(STEPS + 1):
        with torch.no_grad():
            logits.append(model(tokens, use_cache=False).logits[0, -1])
        tokens = torch.cat([tokens, logits[-1].argmax()[None, None]], 1)
    return [step.numpy() for step in logits]


def generated(name: str) -> list[Array]:
    """The same from the compiled programs, for both rows at once; the cache initially has garbage."""
    ids, mask = prompts()
    prefill = compiled(name, "prefill")
    inputs = example_inputs(captured(request(name, "prefill")), request(name, "prefill").config, seed=0)
    outputs = prefill.run(inputs | {"input_ids": ids, "attention_mask": mask})
    logits = [outputs.pop("logits")[:, 0]]
    position = np.asarray(PROMPTS, np.int64)
    for _ in range(STEPS):
        tokens = logits[-1].argmax(-1)[:, None]
        outputs = compiled(name, "decode").run({"input_ids": tokens, "position": position, **outputs})
        logits.append(outputs.pop("logits")[:, 0])
        position = position + 1
    return logits


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_and_decode_generate_what_pytorch_generates_row_by_row(name: str) -> None:
    ids, _ = prompts()
    found, model = generated(name), in_pytorch(name)
    for row, length in enumerate(PROMPTS):
        expected = generated_by_pytorch(model, ids[row, :length])
        for step, logits in enumerate(expected):
            assert relative_error(found[step][row], logits) < 2e-5, (row, step)


def generated_in_chunks(name: str) -> list[Array]:
    """The same with prompts that are read in chunks, one row after the other, the second row first."""
    ids, _ = prompts()
    inputs = example_inputs(captured(request(name, "extend")), request(name, "extend").config, seed=0)
    state = {key: array for key, array in inputs.items() if key.startswith("cache")}
    first = np.zeros((2, 101), np.float32)
    for row in (1, 0):
        for start in range(0, PROMPTS[row], CHUNK):
            chunk = ids[row, start : min(start + CHUNK, PROMPTS[row])]
            padded = np.pad(chunk, (0, CHUNK - len(chunk)))[None]
            mask = (np.arange(CHUNK) < len(chunk)).astype(np.int64)[None]
            given = {"input_ids": padded, "attention_mask": mask, "row": np.array([row]), "position": np.array([start])}
            after = compiled(name, "extend").run(given | state)
            first[row] = after.pop("logits")[0, 0]
            for key in state:
                assert np.array_equal(after[key][1 - row], state[key][1 - row]), "another row has changed"
            state = after
    logits, position = [first], np.asarray(PROMPTS, np.int64)
    for _ in range(STEPS):
        tokens = logits[-1].argmax(-1)[:, None]
        state = compiled(name, "decode").run({"input_ids": tokens, "position": position, **state})
        logits.append(state.pop("logits")[:, 0])
        position = position + 1
    return logits


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", DECODERS)
def test_prompts_that_are_read_in_chunks_generate_what_pytorch_generates(name: str) -> None:
    if not in_pytorch(name)._can_compile_fullgraph:
        with pytest.raises(CaptureError, match="build the phases prefill and decode"):
            capture(request(name, "extend"))
        return
    ids, _ = prompts()
    found, model = generated_in_chunks(name), in_pytorch(name)
    for row, length in enumerate(PROMPTS):
        for step, logits in enumerate(generated_by_pytorch(model, ids[row, :length])):
            assert relative_error(found[step][row], logits) < 2e-5, (row, step)


@pytest.mark.sample(4)
@pytest.mark.parametrize("phase", ["prefill", "extend", "decode"])
@pytest.mark.parametrize("name", ["llama", "falcon", "gemma2"])
def test_the_reference_runs_the_same_step(name: str, phase: str) -> None:
    wanted = request(name, phase)
    graph = captured(wanted)
    inputs = example_inputs(graph, wanted.config, seed=2)
    found = compiled(name, phase).run(inputs)
    expected = reference_outputs(wanted, weights(name), inputs)
    assert found.keys() == expected.keys() == graph.outputs.keys()
    for output in expected:
        assert relative_error(found[output], expected[output]) < 1e-5, output


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["prefill", "extend", "decode"])
def test_state_goes_in_and_out_under_one_name_and_type(phase: str) -> None:
    graph = capture(request("llama", phase, dtype="bfloat16"))
    names = [f"cache.{layer}.{role}" for layer in range(2) for role in ("key", "value")]
    places = {"decode": ["position"], "extend": ["attention_mask", "row", "position"]}.get(phase, ["attention_mask"])
    assert list(graph.inputs) == ["input_ids", *places, *names]
    assert list(graph.outputs) == ["logits", *names]
    for name in names:
        assert graph.inputs[name].type == graph.outputs[name].type
        assert str(graph.inputs[name].type) == f"bf16[2,2,{CAPACITY},8]"


def test_a_prefill_multiplies_one_token_a_row_with_the_vocabulary() -> None:
    graph = captured(request("llama", "prefill"))
    assert graph.outputs["logits"].type.shape == (2, 1, 101)
    (head,) = (node for node in graph.nodes if graph.parameters["lm_head.weight"] in node.operands)
    assert head.operands[0].type.shape == (2, 1, 32)


def test_prefill_and_decode_of_equal_capacity_have_the_same_state() -> None:
    for name in ("llama", "falcon"):
        states = [
            {key: value.type for key, value in captured(request(name, phase)).inputs.items() if key.startswith("cache")}
            for phase in ("prefill", "decode", *(["extend"] if name == "llama" else []))
        ]
        assert states[0] == states[1] == states[-1]


def test_a_place_outside_of_the_cache_is_refused() -> None:
    wanted = request("llama", "decode")
    inputs = example_inputs(captured(wanted), wanted.config, seed=0)
    inputs["position"] = np.asarray([3, CAPACITY])
    with pytest.raises(IndexOutOfRange, match=f"index {CAPACITY} is outside of an axis of size {CAPACITY}"):
        compiled("llama", "decode").run(inputs)


MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 101, "state_size": 4}
JAMBA = {"model_type": "bamba", **_LLAMA, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16}
BERT = {"model_type": "bert", **_TINY, **_SHAPE}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (MAMBA, "MambaForCausalLM has no KV cache; use phase 'forward'"),
        (JAMBA, "layer 0 of BambaForCausalLM has a LinearAttentionLayer, not only keys and values"),
        (BERT, "BertLMHeadModel has no KV cache"),
    ],
)
def test_a_cache_of_another_kind_is_refused_in_a_sentence(config: dict[str, Any], complaint: str) -> None:
    for phase in ("prefill", "decode"):
        with pytest.raises(CaptureError, match=complaint):
            capture(CaptureRequest(config, "text-generation", phase, 1, 8, "float32"))
