"""Small models of real families, and weights for them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from emulator.capture import CaptureRequest, capture, parameter_specs
from emulator.numerics import Array

_VOCABULARY = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = _VOCABULARY | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "electra": _ENCODER,
    "distilbert": _VOCABULARY
    | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
    "gpt2": _VOCABULARY | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER | {"head_dim": 16},
}


def request(
    family: str,
    task: str = "feature-extraction",
    batch: int = 2,
    sequence: int = 12,
    dtype: str = "float32",
    **changes: Any,
) -> CaptureRequest:
    """A request to capture a small model; `changes` go into its configuration."""
    config = {"model_type": family, **CONFIGS[family], **changes}
    phase = "prefill" if task == "text-generation" else "forward"
    return CaptureRequest(config, task, phase, batch, sequence, dtype)


# Graphs are immutable, so tests that look at one model may share one capture of it.
captured = cache(capture)


def weights(wanted: CaptureRequest, seed: int = 0) -> dict[str, Array]:
    """Random weights at which a model's activations stay lively: norms scale by about one, matrices shrink little."""
    generator = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for name, type_ in parameter_specs(wanted).items():
        noise = 0.15 * generator.standard_normal(type_.shape).astype(np.float32)
        made[name] = 1 + noise if "norm" in name.lower() and name.endswith("weight") else noise
    return made


def relative_error(found: Array, expected: Array) -> float:
    """The largest difference, as a share of the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
