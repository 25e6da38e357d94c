"""Folders of tiny models as Hugging Face saves them, with a tokenizer and a chat template."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SENTENCES: Final = (
    "the river rose in the night and the town was dark",
    "hello world, how are you today?",
    "naïve façades 🌊 über Straßen",
)
TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL: Final = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>")
_SIZES: Final = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
_CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **_SIZES,
    },
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "bert": {"architectures": ["BertForSequenceClassification"], "max_position_embeddings": 64, **_SIZES},
}


@cache
def tokenizer() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(SENTENCES * 8, trainer)
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return found


def write(folder: Path, kind: str, **changes: Any) -> Path:
    """A model's folder without weights; `changes` are of its configuration."""
    folder.mkdir(parents=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    vocabulary = {"vocab_size": tokenizer().get_vocab_size(), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = {"model_type": kind, **vocabulary, **_CONFIGS[kind], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if kind != "bert":
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
