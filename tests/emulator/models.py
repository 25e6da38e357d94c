"""Small models of real families, and weights for them."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from nxpipe.emulator.capture import CaptureRequest, capture, parameter_specs
from nxpipe.emulator.numerics import Array

_VOCABULARY = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = _VOCABULARY | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2}

_IMAGES = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES |= {"intermediate_size": 48, "num_labels": 5}
_STAGES = {"image_size": 32, "num_labels": 5, "depths": [2, 1], "num_stages": 2, "hidden_sizes": [8, 16]}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_BOTH = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
_BOTH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 64}

CONFIGS: dict[str, Mapping[str, Any]] = {
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

# Families without tests elsewhere, tested by comparison with PyTorch.
MORE_CONFIGS: dict[str, Mapping[str, Any]] = {
    "albert": _ENCODER | {"embedding_size": 16},
    "bart": _VOCABULARY | _BOTH | {"decoder_start_token_id": 2, "forced_eos_token_id": None},
    "clip": {
        "text_config": _VOCABULARY | _TOWER | {"max_position_embeddings": 64, "projection_dim": 16},
        "vision_config": _IMAGES | {"projection_dim": 16},
        "projection_dim": 16,
    },
    "convnext": _STAGES,
    "dinov2": _IMAGES,
    "falcon": _ENCODER | {"multi_query": True, "new_decoder_architecture": False},
    "gemma2": _DECODER | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt_neo": _VOCABULARY
    | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    | {"window_size": 6, "max_position_embeddings": 64},
    "gptj": _VOCABULARY | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "mixtral": _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": _DECODER,
    "resnet": _STAGES | {"embedding_size": 8, "layer_type": "bottleneck"},
    "swin": {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4]}
    | {"window_size": 4, "num_labels": 5},
    "t5": _VOCABULARY | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "vit": _IMAGES,
    "wav2vec2": _ENCODER
    | {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2}
    | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
    "whisper": _VOCABULARY | _BOTH | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
    "xlm-roberta": _ENCODER,
}

_UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [8, 16], "layers_per_block": 1}
_UNET |= {"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "cross_attention_dim": 12, "norm_num_groups": 4}
_UNET |= {"up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "attention_head_dim": 4}
_CONDITIONS = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
_CONDITIONS |= {"projection_class_embeddings_input_dim": 64}

DIFFUSION_CONFIGS: dict[str, Mapping[str, Any]] = {
    "unet": _UNET,
    "unet-xl": _UNET | _CONDITIONS | {"use_linear_projection": True, "attention_head_dim": [2, 4]},
    "vae": {
        "_class_name": "AutoencoderKL",
        "sample_size": 16,
        "block_out_channels": [8, 16],
        "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D"],
        "up_block_types": ["UpDecoderBlock2D", "UpDecoderBlock2D"],
        "norm_num_groups": 4,
    },
}


def small_config(family: str) -> dict[str, Any]:
    """The configuration of a small model, as in config.json."""
    if family in DIFFUSION_CONFIGS:
        return dict(DIFFUSION_CONFIGS[family])
    return {"model_type": family, **(CONFIGS | MORE_CONFIGS)[family]}


def request(
    family: str,
    task: str = "feature-extraction",
    batch: int = 2,
    sequence: int = 12,
    dtype: str = "float32",
    **changes: Any,
) -> CaptureRequest:
    """A request to capture a small model; `changes` go into its configuration."""
    config = small_config(family) | changes
    phase = "prefill" if task == "text-generation" else "forward"
    return CaptureRequest(config, task, phase, batch, sequence, dtype)


# Graphs are immutable, so tests of a model share its capture.
captured = cache(capture)


def weights(wanted: CaptureRequest, seed: int = 0) -> dict[str, Array]:
    """Random weights with which a model's activations stay lively: norms scale by about one, matrices shrink little."""
    generator = np.random.default_rng(seed)
    made: dict[str, Array] = {}
    for name, type_ in parameter_specs(wanted).items():
        noise = 0.15 * generator.standard_normal(type_.shape).astype(np.float32)
        if not type_.dtype.is_float:  # number of batches of a norm
            made[name] = np.zeros(type_.shape, type_.dtype.held)
        elif name.endswith("running_var"):
            made[name] = 1 + np.abs(noise)
        else:
            made[name] = 1 + noise if "norm" in name.lower() and name.endswith("weight") else noise
    return made


def relative_error(found: Array, expected: Array) -> float:
    """The largest difference relative to the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
