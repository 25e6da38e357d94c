"""Model configuration (config.json) as the compiler uses it: settings that select code are dropped, sizes are limited.

A configuration is untrusted input. It may set a model's hyperparameters; only the compiler chooses the implementation.
So settings that name code, a repository, a path or an implementation are removed at every depth before a library sees
them. They cannot change the graph, so they are in no cache key. The module imports no large library, because cached
builds import it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

_BACKBONES: Final = ("backbone", "architecture")  # may name a model of the Hugging Face hub or of timm

# Names with a leading underscore are metadata of the library that saved the file, except `_class_name`: diffusers
# chooses the model's class by it.
_RELEVANT: Final = frozenset({"_class_name"})
_REMOVED: Final = frozenset(
    {
        # Implementation of attention and experts; transformers downloads an `OWNER/NAME` from the hub.
        *("attn_implementation", "experts_implementation", "attn_kernel", "use_kernels", "kernel_config"),
        # Python code that comes with a model.
        *("auto_map", "trust_remote_code", "code_revision", "custom_pipeline", "custom_pipelines"),
        # Source and release of the file, and the tokenizer or processor of the model.
        *("name_or_path", "transformers_version", "tokenizer_class", "processor_class", "gguf_file"),
        # Attributes of transformers' configuration classes, which a setting would overwrite.
        *("attribute_map", "sub_configs", "sub_configs_defaults", "model_type_to_module"),
    }
)
# Only the top level sets the type of the weights: libraries look a part's up by name among all attributes of torch.
_TOP_LEVEL_ONLY: Final = frozenset({"dtype", "torch_dtype"})


def relevant(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration, and its nested parts, without settings that choose code or record where it was saved."""
    return {key: _filter_nested(value) for key, value in config.items() if _is_relevant(key)}


def _filter_nested(value: object) -> object:
    if isinstance(value, Mapping):
        return {
            key: _filter_nested(part) for key, part in value.items() if _is_relevant(key) and key not in _TOP_LEVEL_ONLY
        }
    return [_filter_nested(part) for part in value] if isinstance(value, list | tuple) else value


def _is_relevant(key: object) -> bool:
    name = str(key)
    return name in _RELEVANT or not (name.startswith("_") or name in _REMOVED)


def without_quantisation(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the unquantised model."""
    parts = {key: value for key, value in config.items() if key != "quantization_config"}
    return {key: without_quantisation(part) if isinstance(part, Mapping) else part for key, part in parts.items()}


def quantised(config: Mapping[str, object]) -> bool:
    """True if the configuration, or a nested part, describes a quantised checkpoint."""
    parts = (value for value in config.values() if isinstance(value, Mapping))
    return bool(config.get("quantization_config")) or any(quantised(part) for part in parts)


def remote_references(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Settings, including nested ones, that name a model in a repository, which a library would download: (key,
    name)."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from remote_references(value)
        elif key in _BACKBONES and isinstance(value, str) and re.search("[/:\\\\]", value):
            yield key, value


@dataclass(frozen=True)
class Limit:
    """The largest supported value of the settings whose name ends in a pattern."""

    name: str  # a regular expression
    most: int
    what: str  # the counted objects, in the plural


# The first matching pattern applies. Above these numbers a library spends minutes and gigabytes on Python objects
# before it creates a single tensor. Each limit is well above the largest published model: 126 layers, 384 experts
# (16,384 in one family of small experts), 128 heads, a vocabulary of 262,144, positions to 10,485,760, and rows of
# 131,072. emulator/capture/budget.py catches counts under other names while the model is built.
LIMITS: Final = (
    Limit(r"layers?|layer_num|blocks?|depths?|stages|repeats|cycles|attention_types|n_layers?", 512, "layers"),
    Limit(r"num_labels|num_classes|num_queries|n_classes|labels", 1_000_000, "labels"),
    Limit(r"experts|expert_num|codebooks|quantizers|residuals", 65_536, "experts"),
    Limit(r"heads?|groups?", 16_384, "heads"),
    Limit(r"vocab|vocab_sizes?|vocabulary|embeddings_size|num_embeddings|buckets", (1 << 31) - 1, "rows of a table"),
    Limit(r"positions?|position_embeddings|n_ctx|n_positions|seq_len|seq_length|context_length|max_length", 1 << 24,
          "positions"),
    Limit(r"dim|dims|size|sizes|width|n_embd|d_\w+|rank|channels?|hidden|features?|kernel|stride|expand|state|n_inner",
          1 << 24, "elements of a row"),
)  # fmt: skip
_LEAST_LIMIT: Final = min(limit.most for limit in LIMITS)
_MOST_DIGITS: Final = 40


@dataclass(frozen=True)
class Oversized:
    """A setting above its limit."""

    field: str  # its full path
    key: str
    value: int
    limit: Limit

    def __str__(self) -> str:
        value = (
            f"{self.value:,}" if abs(self.value) < 10**_MOST_DIGITS else f"a number of {self.value.bit_length()} bits"
        )
        return f"{self.field} is {value}, and at most {self.limit.most:,} {self.limit.what} are supported"


def oversized(config: Mapping[str, object]) -> Iterator[Oversized]:
    """Every setting above its limit, in nested configurations too."""
    for key, value in config.items():
        yield from _oversized(str(key), str(key), value)


def _oversized(field: str, key: str, value: object) -> Iterator[Oversized]:
    """`key` is the last name on the path that is not a number: tables such as `id2label` have numbers for keys."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        limit = limit_of(key) if inf > value > _LEAST_LIMIT else None
        if limit is not None and value > limit.most:
            yield Oversized(field, key, int(value), limit)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _oversized(f"{field}.{name}", key if str(name).isdigit() else str(name), part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _oversized(f"{field}[{number}]", key, part)


def limit_of(key: str) -> Limit | None:
    """The limit of a setting, by the last words of its name; None for ids, seeds and factors, which set no size."""
    return next((limit for limit in LIMITS if re.search(rf"(?:^|_)(?:{limit.name})$", key)), None)
