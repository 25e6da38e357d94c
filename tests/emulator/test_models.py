"""Whole models: the emulator's outputs compared with PyTorch's, with the same weights and inputs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxpipe.emulator.capture import CaptureRequest, example_inputs, reference_outputs
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import execute
from tests.emulator.models import captured, relative_error, request, weights

MODELS = [
    ("bert", "feature-extraction"),
    ("bert", "fill-mask"),
    ("bert", "text-classification"),
    ("roberta", "fill-mask"),
    ("electra", "fill-mask"),
    ("distilbert", "fill-mask"),
    ("distilbert", "text-classification"),
    ("gpt2", "text-generation"),
    ("gpt2", "text-classification"),
    ("llama", "feature-extraction"),
    ("llama", "text-generation"),
    ("llama", "text-classification"),
    ("mistral", "text-generation"),
    ("qwen2", "text-generation"),
    ("qwen3", "text-generation"),
]


def padded_inputs(wanted: CaptureRequest) -> dict[str, Array]:
    """Random ids whose last sequence is shorter, so that the mask matters."""
    graph = captured(wanted)
    inputs = example_inputs(graph, wanted.config, seed=3)
    if wanted.sequence > 4:
        inputs["attention_mask"][-1, -4:] = 0
    return inputs


@pytest.mark.sample(8)
@pytest.mark.parametrize(("family", "task"), MODELS)
def test_without_autocast_a_model_agrees_with_pytorch(family: str, task: str) -> None:
    wanted = request(family, task)
    parameters, inputs = weights(wanted), padded_inputs(wanted)
    found = execute(run_passes(captured(wanted), PassOptions()), parameters, inputs)
    expected = reference_outputs(wanted, parameters, inputs)
    assert found.keys() == expected.keys()
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-5


MORE_MODELS = [
    ("albert", "fill-mask"),
    ("bart", "text2text-generation"),
    ("clip", "feature-extraction"),
    ("convnext", "image-classification"),
    ("dinov2", "feature-extraction"),
    ("falcon", "text-generation"),
    ("gemma2", "text-generation"),
    ("gpt_neo", "text-generation"),
    ("gptj", "text-generation"),
    ("mixtral", "text-generation"),
    ("phi3", "text-generation"),
    ("resnet", "image-classification"),
    ("swin", "image-classification"),
    ("t5", "text2text-generation"),
    ("vit", "image-classification"),
    ("wav2vec2", "automatic-speech-recognition"),
    ("whisper", "automatic-speech-recognition"),
    ("xlm-roberta", "fill-mask"),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("family", "task"), MORE_MODELS)
def test_a_model_of_another_family_agrees_with_pytorch(family: str, task: str) -> None:
    wanted = replace(request(family, task), phase="forward")
    parameters = weights(wanted)
    inputs = example_inputs(captured(wanted), wanted.config, seed=3)
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -4:] = 0
    found = execute(run_passes(captured(wanted), PassOptions()), parameters, inputs)
    expected = reference_outputs(wanted, parameters, inputs)
    assert expected.keys() <= found.keys()
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-5, name


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(("kind", "ceiling"), [("bf16", 0.05), ("fp16", 0.005), ("tf32", 0.005)])
def test_autocast_costs_what_its_type_costs_and_really_happens(family: str, kind: str, ceiling: float) -> None:
    wanted = request(family)
    parameters, inputs = weights(wanted), padded_inputs(wanted)
    graph = captured(wanted)
    expected = reference_outputs(wanted, parameters, inputs)["last_hidden_state"]
    errors = {}
    for mode in ("none", "matmult", "all"):
        lowered = run_passes(graph, PassOptions(mode, kind))
        errors[mode] = relative_error(execute(lowered, parameters, inputs)["last_hidden_state"], expected)
    assert errors["none"] < 1e-5 < errors["matmult"] < ceiling
    assert errors["matmult"] != errors["all"]
    assert 1e-5 < errors["all"] < 2 * ceiling


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_in_bfloat16_is_as_close_to_float32_as_bfloat16_allows(family: str) -> None:
    wanted = request(family, dtype="bfloat16")
    parameters, inputs = weights(wanted), padded_inputs(wanted)
    graph = run_passes(captured(wanted), PassOptions())
    found = execute(graph, parameters, inputs)["last_hidden_state"]
    expected = reference_outputs(wanted, parameters, inputs)["last_hidden_state"]
    assert graph.outputs["last_hidden_state"].type.dtype == "bfloat16"
    assert 1e-4 < relative_error(found, expected) < 0.1


several = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def agrees(wanted: CaptureRequest) -> None:
    parameters, inputs = weights(wanted), padded_inputs(wanted)
    found = execute(run_passes(captured(wanted), PassOptions()), parameters, inputs)
    for name, expected in reference_outputs(wanted, parameters, inputs).items():
        assert relative_error(found[name], expected) < 2e-5


@given(
    heads=st.integers(1, 4),
    width=st.sampled_from([4, 8, 12]),
    layers=st.integers(1, 2),
    inner=st.integers(1, 40),
    activation=st.sampled_from(["gelu", "relu", "gelu_new", "silu"]),
    batch=st.integers(1, 3),
    sequence=st.integers(1, 20),
)
@several
def test_bert_of_any_shape_agrees_with_pytorch(
    heads: int, width: int, layers: int, inner: int, activation: str, batch: int, sequence: int
) -> None:
    changes: dict[str, Any] = {"hidden_size": heads * width, "num_attention_heads": heads, "intermediate_size": inner}
    changes |= {"num_hidden_layers": layers, "hidden_act": activation}
    agrees(request("bert", batch=batch, sequence=sequence, **changes))


@pytest.mark.sample(4)
@given(
    groups=st.integers(1, 3),
    queries=st.integers(1, 3),
    width=st.sampled_from([2, 8, 10]),
    layers=st.integers(1, 2),
    inner=st.integers(1, 40),
    tied=st.booleans(),
    biased=st.booleans(),
    batch=st.integers(1, 3),
    sequence=st.integers(1, 20),
)
@several
def test_llama_of_any_shape_agrees_with_pytorch(
    groups: int, queries: int, width: int, layers: int, inner: int, tied: bool, biased: bool, batch: int, sequence: int
) -> None:
    heads = groups * queries
    changes: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width}
    changes |= {"hidden_size": heads * width, "intermediate_size": inner, "num_hidden_layers": layers}
    changes |= {"tie_word_embeddings": tied, "attention_bias": biased}
    agrees(request("llama", "text-generation", batch=batch, sequence=sequence, **changes))


def test_example_inputs_are_the_same_each_time_and_differ_by_seed() -> None:
    wanted = request("bert")
    graph = captured(wanted)
    first, again, other = (example_inputs(graph, wanted.config, seed) for seed in (0, 0, 1))
    assert np.array_equal(first["input_ids"], again["input_ids"])
    assert not np.array_equal(first["input_ids"], other["input_ids"])
    assert first["attention_mask"].all()
    assert first["input_ids"].min() > 0  # the padding token
    assert first["input_ids"].max() < 101


def test_example_ids_stay_in_the_table_when_the_configuration_does_not_say_how_large_it_is() -> None:
    wanted = request("bert")
    inputs = example_inputs(captured(wanted), {}, seed=0)
    assert 50 < inputs["input_ids"].max() < 101
