"""Small models in Hugging Face layout."""

import json
from pathlib import Path

import pytest

BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}


def write_model(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny-bert", dict(BERT))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny-llama", dict(LLAMA))
