"""Small models of every kind answer on emulated cores what their graphs answer, and PyTorch."""

from dataclasses import replace

import numpy as np
import pytest

from nxpipe.emulator.capture import CaptureRequest
from tests.emulator.models import weights
from tests.models_isa.small import by_graph, compiled, inputs_of, on_cores, require_agreement, wanted, worst

MODELS = [
    ("bert", "BertForMaskedLM", "forward"),
    ("roberta", "RobertaForMaskedLM", "forward"),
    ("distilbert", "DistilBertForMaskedLM", "forward"),
    ("gpt2", "GPT2LMHeadModel", "prefill"),
    ("gpt2", "GPT2LMHeadModel", "decode"),
    ("llama", "LlamaForCausalLM", "prefill"),
    ("llama", "LlamaForCausalLM", "decode"),
    ("mixtral", "MixtralForCausalLM", "prefill"),
    ("mixtral", "MixtralForCausalLM", "decode"),
    ("t5", "T5ForConditionalGeneration", "forward"),
    ("vit", "ViTForImageClassification", "forward"),
    ("resnet", "ResNetForImageClassification", "forward"),
    ("clip", "CLIPModel", "forward"),
    ("unet", None, "forward"),
]
MORE = [
    ("mistral", "MistralForCausalLM", "prefill"),
    ("qwen2", "Qwen2ForCausalLM", "prefill"),
    ("qwen3", "Qwen3ForCausalLM", "decode"),
    ("gemma2", "Gemma2ForCausalLM", "prefill"),
    ("phi3", "Phi3ForCausalLM", "prefill"),
    ("falcon", "FalconForCausalLM", "prefill"),
    ("gpt_neo", "GPTNeoForCausalLM", "prefill"),
    ("gptj", "GPTJForCausalLM", "prefill"),
    ("albert", "AlbertForMaskedLM", "forward"),
    ("electra", "ElectraForMaskedLM", "forward"),
    ("xlm-roberta", "XLMRobertaForMaskedLM", "forward"),
    ("bart", "BartForConditionalGeneration", "forward"),
    ("whisper", "WhisperForConditionalGeneration", "forward"),
    ("convnext", "ConvNextForImageClassification", "forward"),
    ("dinov2", "Dinov2Model", "forward"),
    ("swin", "SwinForImageClassification", "forward"),
    ("unet-xl", None, "forward"),
    ("vae", None, "forward"),
    ("wav2vec2", "Wav2Vec2ForCTC", "forward"),
]
_MIXTURE = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
_MIXTURE |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64}
MIXTURES = {
    "MixtralForCausalLM": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {"model_type": "qwen2_moe", "num_experts": 7, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 32},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", "num_experts": 32, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 24},
    "GptOssForCausalLM": {"model_type": "gpt_oss", "num_local_experts": 33, "num_experts_per_tok": 4}
    | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "Llama4ForCausalLM": {"model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1}
    | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
}
QUICK = [("bert", "BertForMaskedLM", "forward"), ("clip", "CLIPModel", "forward")]
Model = tuple[str, str | None, str]


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", QUICK, ids=str)
def test_a_program_answers_as_its_graph_and_as_pytorch_does(model: Model) -> None:
    require_agreement(wanted(*model))


@pytest.mark.slow
@pytest.mark.parametrize("core", ["v2", "v3"])
@pytest.mark.parametrize("model", MODELS + MORE, ids=str)
def test_a_program_of_every_kind_of_model_answers_as_its_graph_and_as_pytorch_does(model: Model, core: str) -> None:
    require_agreement(wanted(*model), core)


@pytest.mark.sample(40)
@pytest.mark.parametrize("core", ["v2", "v3"])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("phase", "batch"), [("decode", 1), ("decode", 3), ("decode", 8), ("prefill", 1)])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_mixture_of_experts_answers_as_its_graph(
    architecture: str, phase: str, batch: int, degree: int, core: str
) -> None:
    config = _MIXTURE | MIXTURES[architecture] | {"architectures": [architecture]}
    request = CaptureRequest(config, "text-generation", phase, batch, 16, "float32", 16 if phase == "prefill" else None)
    program, parameters = compiled(request, degree=degree, core=core), weights(request)
    inputs = inputs_of(program, request)
    found, expected = (
        load.run(inputs) for load in (on_cores(program, parameters, core), by_graph(program, parameters))
    )
    assert worst(found, expected) < 5e-6


@pytest.mark.slow
@pytest.mark.parametrize("autocast", ["matmult", "all"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_in_narrow_types_a_program_differs_from_its_graph_by_their_rounding_alone(model: Model, autocast: str) -> None:
    """Where a sum in another order rounds to a bfloat16 neighbour, all that follows differs by so much."""
    request = wanted(*model)
    program, parameters = compiled(request, autocast), weights(request)
    inputs = inputs_of(program, request)
    found, expected = (
        load.run(inputs) for load in (on_cores(program, parameters, "v2"), by_graph(program, parameters))
    )
    assert worst(found, expected) < 2**-5


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("order", ["program", "random:5"])
def test_engines_in_any_order_give_the_same_answer(degree: int, order: str) -> None:
    request = wanted("llama", "LlamaForCausalLM", "prefill")
    program, parameters = compiled(request, degree=degree), weights(request)
    inputs = inputs_of(program, request)
    usual, other = (on_cores(program, parameters, "v2", entry).run(inputs) for entry in ("hostile", order))
    for name, array in usual.items():
        np.testing.assert_array_equal(other[name], array)


def _followed(request: CaptureRequest, degree: int, steps: int, *, cores: bool) -> list[np.ndarray]:
    """The logits of a prompt's last token, and of each token after it, beside the cache that the last one left."""
    parameters = weights(request)
    programs = [compiled(entry, degree=degree) for entry in (request, replace(request, phase="decode", capacity=None))]
    load = [on_cores(program, parameters, "v2") if cores else by_graph(program, parameters) for program in programs]
    inputs = inputs_of(programs[0], request)
    inputs = {name: 0 * array if name.startswith("cache.") else array for name, array in inputs.items()}
    inputs["attention_mask"][:, -steps:] = 0
    answer = load[0].run(inputs)
    position = inputs["attention_mask"].sum(axis=1)
    logits = [answer["logits"]]
    for number in range(steps):
        chosen = logits[-1][:, -1].argmax(axis=-1)[:, None]
        cache = {name: array for name, array in answer.items() if name.startswith("cache.")}
        answer = load[1].run({"input_ids": chosen, "position": position + number, **cache})
        logits.append(answer["logits"])
    return logits


@pytest.mark.sample(4)
@pytest.mark.parametrize("degree", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_decoder_is_followed_over_a_prompt_and_eight_tokens_beside_its_cache(degree: int) -> None:
    request = wanted("llama", "LlamaForCausalLM", "prefill", 20)
    found, expected = (_followed(request, degree, 8, cores=cores) for cores in (True, False))
    assert len(found) == 9
    for ours, theirs in zip(found, expected, strict=True):
        assert worst({"logits": ours}, {"logits": theirs}) < 5e-6
