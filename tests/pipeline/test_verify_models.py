"""Small models of every class: each of their programs is within the default thresholds of nxpipe.toml.

The task is that of the model's own class, as `nxpipe verify` finds it in config.json.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config.sections import Verify
from nxpipe.pipeline.models.configuration import all_phases, shapes_of
from nxpipe.pipeline.models.source import resolve
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.verify.cases import compare_model
from nxpipe.pipeline.verify.comparison import VerifyOptions
from tests.emulator.models import small_config
from tests.pipeline.conftest import write_model

USUAL = Verify()
ALLOWED = Thresholds(USUAL.min_cosine, USUAL.max_relative_error, max_kl=0.01)

CLASSES = [
    ("llama", "LlamaForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("gemma2", "Gemma2ForCausalLM"),
    ("phi3", "Phi3ForCausalLM"),
    ("falcon", "FalconForCausalLM"),
    ("gpt2", "GPT2LMHeadModel"),
    ("gpt_neo", "GPTNeoForCausalLM"),
    ("gptj", "GPTJForCausalLM"),
    ("bert", "BertForMaskedLM"),
    ("roberta", "RobertaForMaskedLM"),
    ("distilbert", "DistilBertForMaskedLM"),
    ("albert", "AlbertForMaskedLM"),
    ("electra", "ElectraForMaskedLM"),
    ("xlm-roberta", "XLMRobertaForMaskedLM"),
    ("t5", "T5ForConditionalGeneration"),
    ("bart", "BartForConditionalGeneration"),
    ("whisper", "WhisperForConditionalGeneration"),
    ("vit", "ViTForImageClassification"),
    ("clip", "CLIPModel"),
    ("resnet", "ResNetForImageClassification"),
    ("convnext", "ConvNextForImageClassification"),
    ("dinov2", "Dinov2Model"),
    ("swin", "SwinForImageClassification"),
    ("unet", None),  # diffusers writes the class elsewhere
    ("unet-xl", None),
    ("vae", None),
    ("wav2vec2", "Wav2Vec2ForCTC"),
]


_LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What else the published models of these classes are configured to.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("phi3", {"rope_scaling": _LONG, "original_max_position_embeddings": 8, "max_position_embeddings": 64}),
    ("llama", {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 32}, "torch_dtype": "bfloat16"}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("falcon", {"alibi": True, "multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("gptj", {"torch_dtype": "float16"}),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ("resnet", {"layer_type": "basic"}),
    ("swin", {"image_size": 36, "window_size": 5}),
    ("dinov2", {"use_swiglu_ffn": True}),
    ("wav2vec2", {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}),
]


def quietly(_: str) -> AbstractContextManager[None]:
    return nullcontext()


NO_EXTEND = {"gpt_neo"}  # it takes the last key of its cache for the newest


def verifies(folder: Path, config: dict[str, Any]) -> None:
    source = resolve(str(write_model(folder, config)))
    phases = all_phases(source.task) if config.get("model_type") not in NO_EXTEND else source.default_phases
    shapes = shapes_of(phases, [2], [12])
    wanted = BuildSpec(source, RandomWeights(0), shapes, instance("trn2.48xlarge"))
    compared = list(compare_model(wanted, VerifyOptions(), quietly))
    assert [done.program for done in compared] == [shape.name for shape in sorted(shapes)]
    for done in compared:
        for run in done.emulated:
            assert run.outputs
            assert not run.faults(ALLOWED), done.program


def described(family: str) -> dict[str, Any]:
    architecture = dict(CLASSES)[family]
    named = {"architectures": [architecture], "torch_dtype": "float32"} if architecture else {}
    return {**small_config(family), **named}


@pytest.mark.sample(16)
@pytest.mark.parametrize("family", [family for family, _ in CLASSES])
def test_a_small_model_of_every_class_verifies_in_all_of_its_programs(family: str, tmp_path: Path) -> None:
    verifies(tmp_path / family, described(family))


@pytest.mark.sample(6)
def test_a_decoder_that_chooses_its_frequencies_by_the_length_so_far_verifies(tmp_path: Path) -> None:
    family, changes = VARIANTS[0]
    verifies(tmp_path / family, {**described(family), **changes})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), VARIANTS[1:], ids=str)
def test_a_model_of_a_class_verifies_however_it_is_configured(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    verifies(tmp_path / family, {**described(family), **changes})
