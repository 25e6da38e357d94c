"""The catalogue of public models: every entry builds the model that was published, and reading it costs nothing."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, PretrainedConfig

from nxpipe.pipeline.models.catalogue import KnownModel, find, nearest

ROOT = Path(__file__).parents[2]
CATALOGUE = json.loads((ROOT / "pipeline/models/known_models.json").read_text(encoding="utf-8"))

CLASS_OF_TASK = {
    "automatic-speech-recognition": transformers.AutoModelForSpeechSeq2Seq,
    "feature-extraction": transformers.AutoModel,
    "fill-mask": transformers.AutoModelForMaskedLM,
    "image-classification": transformers.AutoModelForImageClassification,
    "image-feature-extraction": transformers.AutoModel,
    "text-generation": transformers.AutoModelForCausalLM,
    "text2text-generation": transformers.AutoModelForSeq2SeqLM,
    "zero-shot-image-classification": transformers.AutoModel,
}

# What config.json files say in words that transformers has since renamed or moved elsewhere.
OLDER_WORDS = {"architectures", "decoder_start_token_id", "num_labels", "rope_scaling", "rope_theta", "torch_dtype"}


def known(model_id: str) -> KnownModel:
    model = find(model_id)
    assert model is not None
    return model


def published(model: KnownModel) -> torch.nn.Module:
    """The model in its own library's class, without weights."""
    with torch.device("meta"):
        if "_class_name" in model.config:
            settings = {key: value for key, value in model.config.items() if not key.startswith("_")}
            built: torch.nn.Module = getattr(diffusers, str(model.config["_class_name"]))(**settings)
            return built
        return CLASS_OF_TASK[model.task].from_config(config_of(model))


def config_of(model: KnownModel) -> PretrainedConfig:
    return AutoConfig.for_model(**model.config)


@pytest.mark.sample(8)
@pytest.mark.parametrize("model_id", CATALOGUE)
def test_an_entry_builds_the_published_model_to_the_last_parameter(model_id: str) -> None:
    model = known(model_id)
    assert sum(parameter.numel() for parameter in published(model).parameters()) == model.parameters


DIFFUSION = [name for name, entry in CATALOGUE.items() if "_class_name" in entry["config"]]


@pytest.mark.parametrize("model_id", DIFFUSION)
def test_an_entry_of_a_diffusion_model_says_nothing_that_diffusers_does_not_understand(model_id: str) -> None:
    config = known(model_id).config
    understood = inspect.signature(getattr(diffusers, str(config["_class_name"])).__init__).parameters
    assert [key for key in config if key not in understood] == ["_class_name"]


@pytest.mark.parametrize("model_id", [name for name in CATALOGUE if name not in DIFFUSION])
def test_an_entry_says_nothing_that_transformers_does_not_understand(model_id: str) -> None:
    model = known(model_id)
    default = AutoConfig.for_model(model.config["model_type"])
    assert [key for key in model.config if key not in OLDER_WORDS and not hasattr(default, key)] == []
    architectures: Any = model.config["architectures"]
    (architecture,) = architectures
    assert getattr(transformers, architecture).config_class.model_type == model.config["model_type"]


@pytest.mark.parametrize("model_id", [name for name, entry in CATALOGUE.items() if "rope_theta" in entry["config"]])
def test_the_rotary_base_and_its_scaling_reach_the_model(model_id: str) -> None:
    config = known(model_id).config
    rope = config_of(known(model_id)).rope_parameters
    assert rope["rope_theta"] == config["rope_theta"]
    scaling: Any = config.get("rope_scaling") or {"rope_type": "default"}
    assert scaling.items() <= rope.items()


def test_every_name_belongs_to_one_model() -> None:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), pairs
        return dict(pairs)

    text = (ROOT / "pipeline/models/known_models.json").read_text(encoding="utf-8")
    entries = json.loads(text, object_pairs_hook=without_repeats)
    names = [name for id_, entry in entries.items() for name in (id_, *entry["aliases"])]
    assert len(names) == len(set(names))


def test_an_alias_finds_the_same_model_as_the_id() -> None:
    for id_, entry in CATALOGUE.items():
        for alias in entry["aliases"]:
            assert find(alias) == find(id_)
    assert known("google-bert/bert-base-uncased").id == "bert-base-uncased"


def test_ids_are_case_sensitive_as_on_the_hub() -> None:
    assert find("BERT-base-uncased") is None
    assert nearest("BERT-base-uncased")[0] == "bert-base-uncased"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bert-base-uncasd", "bert-base-uncased"),
        ("roberta_base", "roberta-base"),
        ("Llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("meta-llama/Llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
    ],
)
def test_a_misspelt_id_is_answered_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    assert find(typed) is None
    assert nearest(typed)[0] == meant


@given(st.text(max_size=60))
def test_whatever_is_typed_the_answer_names_at_most_three_models_that_exist(typed: str) -> None:
    answers = nearest(typed)
    assert len(answers) == len(set(answers)) <= 3
    assert all(find(answer) for answer in answers)


def test_a_caller_who_edits_a_configuration_edits_only_a_copy() -> None:
    scaling: Any = known("meta-llama/Llama-3.1-8B").config["rope_scaling"]
    scaling["factor"] = 1.0
    untouched: Any = known("meta-llama/Llama-3.1-8B").config["rope_scaling"]
    assert untouched["factor"] == 8.0


def test_finding_a_model_needs_nothing_but_the_standard_library() -> None:
    script = (
        "import sys; from nxpipe.pipeline.models.catalogue import find; assert find('gpt2'); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"nxpipe", "__main__"}
