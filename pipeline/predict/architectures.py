"""Architectures of models by name, or as a config.json describes them: the sizes from which `work` counts.

`architectures.json` has the models of published tables and popular ones; an entry `as` names a model of equal sizes.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.models import catalogue
from nxpipe.pipeline.predict.work import Architecture, NotPredicted
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file

_DATA: Final = Path(__file__).with_name("architectures.json")
_LARGEST: Final = 1 << 20  # bytes of a config.json
# Model types of transformers: decoders whose feed-forward layer has a gate, other decoders, encoders.
_GATED: Final = frozenset(
    {"cohere", "cohere2", "dbrx", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss"}
    | {"granite", "granitemoe", "helium", "hunyuan_v1_dense", "llama", "llama4_text", "ministral", "mistral"}
    | {"mixtral", "olmo", "olmo2", "olmo3", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"}
    | {"smollm3", "stablelm", "vaultgemma"}
)
_DECODERS: Final = _GATED | {
    *("apertus", "arcee", "biogpt", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt"),
    *("nemotron", "openai-gpt", "opt", "persimmon", "phi", "starcoder2", "xglm"),
}
_ENCODERS: Final = frozenset(
    {"albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "mpnet", "roberta"}
    | {"roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
)
_VISION: Final = frozenset({"beit", "data2vec-vision", "deit", "dinov2", "ijepa", "vit", "vit_msn"})
_SEQUENCES: Final = frozenset({"bart", "marian", "mbart", "pegasus"})


def architecture(*names: str) -> Architecture | None:
    """The architecture of the first of these names that is known, or of a folder with a config.json; None without
    one."""
    for name in names:
        if found := _published().get(name):
            return architecture(found["as"]) if "as" in found else found
        if name and (path := Path(name, "config.json")).is_file():
            return _of_folder(path)
        if (known := catalogue.find(name)) and (found := architecture_of(known.config)):
            return found
    return None


def _of_folder(path: Path) -> Architecture:
    """The architecture of a user's model; NotPredicted for a config.json without its sizes."""
    try:
        config = json_of(read_file(path, limit=_LARGEST))
        if not isinstance(config, dict):
            raise TypeError("no object")
        found = architecture_of(config)
    except (DocumentInvalid, ArithmeticError, KeyError, TypeError) as fault:
        raise NotPredicted(f"{path}: not the configuration of a model ({fault!r:.80}); pass its config.json") from fault
    if found is None:
        raise NotPredicted(f"{path}: no closed form of model_type {str(config.get('model_type'))!r:.40} is known")
    return found


@cache
def _published() -> Mapping[str, Architecture]:
    architectures: dict[str, Architecture] = json.loads(_DATA.read_text(encoding="utf-8"))
    return architectures


def architecture_of(config: Mapping[str, Any]) -> Architecture | None:
    """The architecture that a config.json describes; of several models in one that of the text. None for a model
    type without a closed form."""
    kind = config.get("model_type")
    if kind in _DECODERS:
        return _sizes(config) | {"kind": "decoder", "gated": kind in _GATED} | _experts(config)
    if kind in _ENCODERS:
        return _sizes(config) | {"kind": "encoder", "shared_layers": kind == "albert"}
    if kind in ("t5", "mt5"):
        gated = str(config.get("feed_forward_proj", "")).startswith("gated")
        wide = {"intermediate": config["d_ff"], "hidden": config["d_model"], "head_dim": config.get("d_kv", 64)}
        return _sizes({"hidden_size": config["d_model"], **config}) | wide | {"kind": "encoder-decoder", "gated": gated}
    if kind in _SEQUENCES:
        return _sizes(config) | {"kind": "encoder-decoder", "gated": False}
    if kind in _VISION:
        patch, classes = config.get("patch_size", 16), config.get("num_labels", 1000)
        return _sizes({"vocab_size": 0, **config}) | {"kind": "vision-transformer", "patch": patch, "classes": classes}
    if kind == "resnet":
        return {"kind": "resnet", "block": config.get("layer_type", "bottleneck"), "depths": config["depths"]}
    text = config.get("text_config")
    return architecture_of(text) if isinstance(text, Mapping) else None


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden = _first(config, "hidden_size", "n_embd", "dim", "d_model")
    heads = _first(
        config, "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "attention_heads"
    )
    single = bool(config.get("multi_query")) and not config.get("new_decoder_architecture")
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads") or _nested(config, "attn_config", "kv_n_heads")
    return {
        "layers": _first(config, "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": 1 if single else kv_heads or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "intermediate": _first(config, "intermediate_size", "hidden_dim", "n_inner", "encoder_ffn_dim", "ffn_dim")
        or 4 * hidden,
        "vocab": config["vocab_size"],
    }


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a decoder; layers between them have one feed-forward layer of `intermediate`."""
    experts = _first(config, "num_local_experts", "num_experts") or _nested(config, "ffn_config", "moe_num_experts")
    if not experts:
        return {}
    single = _first(config, "moe_intermediate_size", "intermediate_size")
    active = _first(config, "num_experts_per_tok", "experts_per_token") or _nested(config, "ffn_config", "moe_top_k")
    found = {
        "experts": experts,
        "active_experts": active,
        "expert_intermediate": single or _nested(config, "ffn_config", "ffn_hidden_size"),
        "shared_intermediate": config.get("shared_expert_intermediate_size", 0),
    }
    if config["model_type"] == "llama4_text":  # one shared expert, and dense layers between those with experts
        layers, step = config["num_hidden_layers"], config.get("interleave_moe_layer_step", 1)
        dense = {"dense_layers": layers - layers // step, "intermediate": config.get("intermediate_size_mlp", 0)}
        return found | {"shared_intermediate": single} | dense
    return found


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key)), 0)


def _nested(config: Mapping[str, Any], part: str, key: str) -> Any:
    inner = config.get(part)
    return inner.get(key, 0) if isinstance(inner, Mapping) else 0
