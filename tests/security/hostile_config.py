"""Hostile configurations of many model types, determined by a seed.

Each starts as a small valid model and has one to four changes: a setting replaced, a setting added at some depth, or
the whole wrapped into parts. Replacements are names of code, hub repositories and files, sizes, values of other types,
names of arguments and attributes, and text with terminal controls.
"""

import copy
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_TEXT: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "bert": {**_TEXT, "architectures": ["BertForMaskedLM"]},
    "roberta": {**_TEXT, "architectures": ["RobertaForSequenceClassification"]},
    "llama": {**_TEXT, "num_key_value_heads": 2, "architectures": ["LlamaForCausalLM"]},
    "qwen2": {**_TEXT, "num_key_value_heads": 2, "architectures": ["Qwen2ForCausalLM"]},
    "mixtral": {**_TEXT, "num_key_value_heads": 2, "num_local_experts": 2, "architectures": ["MixtralForCausalLM"]},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97, "n_positions": 64,
             "architectures": ["GPT2LMHeadModel"]},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 97, "max_position_embeddings": 64,
                "attention_types": [[["global", "local"], 1]], "architectures": ["GPTNeoForCausalLM"]},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 97,
           "architectures": ["T5ForConditionalGeneration"]},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 97,
                   "max_position_embeddings": 64, "architectures": ["DistilBertForMaskedLM"]},
    "vit": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
            "image_size": 32, "patch_size": 16, "architectures": ["ViTForImageClassification"]},
    "clip": {"text_config": dict(_TEXT), "projection_dim": 32, "architectures": ["CLIPModel"],
             "vision_config": {**_TEXT, "image_size": 32, "patch_size": 16}},
    "dpt": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
            "image_size": 32, "patch_size": 16, "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8,
            "backbone_out_indices": [0, 1, 2, 3], "architectures": ["DPTForDepthEstimation"]},
}  # fmt: skip

_GADGETS: Final = (
    *(
        "evil/kernel",
        "kernels-community/x@0123abcd:f",
        "hf-hub:evil/x",
        "evil--x.Evil",
        "evil.Evil",
        "flash_attention_2",
    ),
    *("../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "/dev/zero", "os.system", "builtins:eval", "eval"),
    *("__import__('os').system('true')", "load", "__builtins__", "__class__", "torch.hub.load", "antigravity"),
    *("\x1b]0;title\x07", "\x1b[31mred", "::error::x\n::add-mask::y", "\u202eevil", "\ud800", "x" * 5000, "", "\0"),
)
_SIZES: Final = (0, -1, 3, 2**31, 2**53 - 1, 2**63, 10**9, 10**18, 20_000, 1e300, math.inf, -math.inf, math.nan, 0.5)
_SHAPES: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        [],
        {},
        "32",
        [1, 2, 3],
        [[1], [2]],
        {"a": 1},
        {"": None},
        [None],
        [{}],
        {"model_type": "bert"},
    ),
    *(
        {"__float__": "Infinity"},
        [10**9] * 3,
        {"0": "x", "1": {"y": "z"}},
        [["global"], 10**9],
        {"hidden_size": 10**12},
    ),
)
_KEYS: Final = (
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation"),
    *(
        "use_kernels",
        "kernel_config",
        "auto_map",
        "trust_remote_code",
        "name_or_path",
        "_name_or_path",
        "code_revision",
    ),
    *(
        "tokenizer_class",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "backbone",
        "backbone_config",
        "use_timm_backbone",
    ),
    *(
        "self",
        "cls",
        "kwargs",
        "config",
        "args",
        "model_type",
        "__class__",
        "__dict__",
        "__init__",
        "to_dict",
        "sub_configs",
    ),
    *("attribute_map", "per_layer_config", "generation_config", "pruned_heads", "id2label", "label2id", "num_labels"),
    *(
        "rope_scaling",
        "rope_parameters",
        "layer_types",
        "hidden_act",
        "activation_function",
        "text_config",
        "is_decoder",
    ),
    *("add_cross_attention", "tie_word_embeddings", "problem_type", "output_attentions", "output_hidden_states"),
    *("custom_pipelines", "architectures", "return_dict", "use_cache", "head_dim", "num_experts", "sliding_window"),
    *("chunk_size_feed_forward", "initializer_range", "pad_token_id", "router_dtype", "sinusoidal_pos_embds", "ключ"),
)


@dataclass(frozen=True)
class Variant:
    number: int
    config: dict[str, Any]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def variants(numbers: range, seed: int) -> Iterator[Variant]:
    """Configurations, each determined by the seed and its own number."""
    for number in numbers:
        chance = random.Random(f"{seed}/{number}")
        name = chance.choice(sorted(MODELS))
        config = {"model_type": name, **copy.deepcopy(MODELS[name])}
        for _ in range(chance.randint(1, 4)):
            chance.choice((_replace, _add, _wrap))(config, chance)
        yield Variant(number, config)


def _places(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The document and all of its parts."""
    found = [config]
    for value in config.values():
        if isinstance(value, dict):
            found += _places(value)
    return found


def _value(chance: random.Random) -> Any:
    return copy.deepcopy(chance.choice(chance.choice((_GADGETS, _SIZES, _SHAPES))))


def _replace(config: dict[str, Any], chance: random.Random) -> None:
    place = chance.choice(_places(config))
    keys = [key for key in place if key != "model_type"]
    if keys:
        place[chance.choice(keys)] = _value(chance)


def _add(config: dict[str, Any], chance: random.Random) -> None:
    chance.choice(_places(config))[chance.choice(_KEYS)] = _value(chance)


def _wrap(config: dict[str, Any], chance: random.Random) -> None:
    """Nest a part that is a model itself, or many parts."""
    depth, inner = chance.choice((1, 3, 30, 300)), {chance.choice(_KEYS): _value(chance)}
    for _ in range(depth):
        inner = {chance.choice(("text_config", "backbone_config", "decoder", "x")): inner}
    config[chance.choice(_KEYS)] = {"model_type": chance.choice(sorted(MODELS)), **inner}
