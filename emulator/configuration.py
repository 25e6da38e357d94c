"""Model configuration (config.json) as the compiler uses it: settings that select code are dropped, sizes are limited.

A configuration is untrusted input. It describes a model in words and numbers; which implementation computes it is the
compiler's choice alone. So nothing that names code, a repository, a path or an implementation reaches a library, at
whatever depth it stands; since it cannot change the graph, it is in no cache key either. Importing this is light: a
cached build does.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

_BACKBONES: Final = ("backbone", "architecture")  # may name a model of the hub, or of the library timm

# Names with a leading underscore are notes of the library that saved the file. One of them is no note: diffusers
# chooses the model's class by it.
_RELEVANT: Final = frozenset({"_class_name"})
_LEFT_OUT: Final = frozenset(
    {
        # Who computes attention and experts; transformers loads any `OWNER/NAME` given here from the hub.
        *("attn_implementation", "experts_implementation", "attn_kernel", "use_kernels", "kernel_config"),
        # Python code that comes with a model.
        *("auto_map", "trust_remote_code", "code_revision", "custom_pipeline", "custom_pipelines"),
        # Where the file came from, by which release, and what reads text beside the model.
        *("name_or_path", "transformers_version", "tokenizer_class", "processor_class", "gguf_file"),
        # Names of transformers' own machinery, which would be replaced on the configuration object.
        *("attribute_map", "sub_configs", "sub_configs_defaults", "model_type_to_module"),
    }
)
# The type of the weights is that of the whole: libraries look the name of a part's up among all that torch has.
_OF_THE_WHOLE: Final = frozenset({"dtype", "torch_dtype"})


def relevant(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration without what only chooses code, or says where it was saved; its parts alike."""
    return {key: _within(value) for key, value in config.items() if _counts(key)}


def _within(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _within(part) for key, part in value.items() if _counts(key) and key not in _OF_THE_WHOLE}
    return [_within(part) for part in value] if isinstance(value, list | tuple) else value


def _counts(key: object) -> bool:
    name = str(key)
    return name in _RELEVANT or not (name.startswith("_") or name in _LEFT_OUT)


def without_quantisation(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the model that a quantised one was made from."""
    parts = {key: value for key, value in config.items() if key != "quantization_config"}
    return {key: without_quantisation(part) if isinstance(part, Mapping) else part for key, part in parts.items()}


def quantised(config: Mapping[str, object]) -> bool:
    """Whether the configuration, or that of a part, is of a quantised checkpoint."""
    parts = (value for value in config.values() if isinstance(value, Mapping))
    return bool(config.get("quantization_config")) or any(quantised(part) for part in parts)


def remote_references(config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Settings, of the parts too, that name another model in a repository, which a library would fetch."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from remote_references(value)
        elif key in _BACKBONES and isinstance(value, str) and re.search("[/:\\\\]", value):
            yield key, value


@dataclass(frozen=True)
class Limit:
    """The most that a number may be whose name ends in these words."""

    name: str  # a pattern
    most: int
    what: str  # that it counts


# The first pattern that fits decides. Beyond these numbers a library spends minutes and gigabytes on objects that it
# makes one by one, before a single tensor is described. Each is well above the largest model published: 126 layers,
# 384 experts (16,384 in one family of small ones), 128 heads, a vocabulary of 262,144, positions to 10,485,760, and
# rows of 131,072. What a name says wrongly is noticed while the model is built: emulator/capture/budget.py.
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
_SHOWN: Final = 40


@dataclass(frozen=True)
class Oversized:
    """A number that no model has."""

    field: str  # with the way to it
    key: str
    value: int
    limit: Limit

    def __str__(self) -> str:
        value = f"{self.value:,}" if abs(self.value) < 10**_SHOWN else f"a number of {self.value.bit_length()} bits"
        return f"{self.field} is {value}, and at most {self.limit.most:,} {self.limit.what} are supported"


def oversized(config: Mapping[str, object]) -> Iterator[Oversized]:
    """Every number beyond its limit, in the parts of a composite configuration too."""
    for key, value in config.items():
        yield from _oversized(str(key), str(key), value)


def _oversized(field: str, key: str, value: object) -> Iterator[Oversized]:
    """`key` is the last name on the way that is one: a table of numbers by label has numbers for keys."""
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
    """The limit of a setting, by the last words of its name; None of ids, seeds and factors, which size nothing."""
    return next((limit for limit in LIMITS if re.search(rf"(?:^|_)(?:{limit.name})$", key)), None)
