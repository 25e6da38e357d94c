"""Diffusion models of the diffusers library: the denoising U-Net, and encoder and decoder of the autoencoder.

A program is a function of plain tensors, so the classes here differ from those of diffusers in the signature of
`forward` and in nothing else: parameters keep their names. `sequence` counts the tokens of the prompt.
"""

import importlib
from typing import Any

import torch

from nxpipe.emulator.capture.budget import bounded, require_modest_settings
from nxpipe.emulator.capture.request import TASKS, CaptureRequest
from nxpipe.emulator.configuration import relevant
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.types import DType, TensorType

# What Stable Diffusion XL says about size and place of an image, one number each.
_SIZE_NUMBERS = 6


def build_diffusion_model(request: CaptureRequest) -> Any:
    """The model on the meta device, in evaluation mode."""
    name = TASKS[request.task]
    found = request.config.get("_class_name")
    if found != name:
        raise CaptureError(f"task {request.task!r} is for a {name}, but the configuration is of a {found}")
    kind = type(name, (DIFFUSION[request.task], getattr(_library(), name)), {})
    require_modest_settings(request.config)
    settings = {key: value for key, value in relevant(request.config).items() if not key.startswith("_")}
    try:
        with bounded(), torch.device("meta"), torch.no_grad():
            # PyTorch's own `to`: diffusers' warns about layers that checkpoints keep in float32.
            return torch.nn.Module.to(kind(**settings), getattr(torch, request.dtype)).eval()
    except Exception as fault:  # third-party code: whatever it raises is a reason why there is no model
        raise CaptureError(f"{name} cannot be built from this configuration: {fault}") from fault


def _library() -> Any:
    try:
        return importlib.import_module("diffusers")
    except ImportError:
        raise CaptureError("a diffusion model needs the diffusers library: pip install 'nxpipe[diffusion]'") from None


class _Untied:
    def tie_weights(self) -> None:
        """transformers' models are told to; here no weight is another's."""


class _Denoising(_Untied):
    """Text and size conditions of Stable Diffusion XL come as tensors of their own, not inside a dictionary."""

    def forward(
        self, sample: Any, timestep: Any, encoder_hidden_states: Any, text_embeds: Any = None, time_ids: Any = None
    ) -> Any:
        added = None if text_embeds is None else {"text_embeds": text_embeds, "time_ids": time_ids}
        result = super().forward(  # type: ignore[misc]
            sample, timestep, encoder_hidden_states, added_cond_kwargs=added, return_dict=False
        )
        return {"prediction": result[0]}  # not `sample`: what comes out as it went in would be taken for state


class _Encoding(_Untied):
    """Mean and logarithm of the variance: what to draw from them is for the host."""

    def forward(self, sample: Any) -> Any:
        return {"parameters": self.encode(sample).latent_dist.parameters}  # type: ignore[attr-defined]


class _Decoding(_Untied):
    def forward(self, latents: Any) -> Any:
        return {"sample": self.decode(latents, return_dict=False)[0]}  # type: ignore[attr-defined]


DIFFUSION = {"image-denoising": _Denoising, "image-encoding": _Encoding, "image-decoding": _Decoding}


def diffusion_input_types(model: Any, request: CaptureRequest) -> dict[str, TensorType]:
    """Sizes are those that the model was trained for."""
    settings, batch = model.config, request.batch
    size = settings.sample_size

    def floats(*shape: int) -> TensorType:
        return TensorType((batch, *shape), DType(request.dtype))

    if request.task == "image-encoding":
        return {"sample": floats(settings.in_channels, size, size)}
    if request.task == "image-decoding":
        latent = size // 2 ** (len(settings.block_out_channels) - 1)
        return {"latents": floats(settings.latent_channels, latent, latent)}
    types = {
        "sample": floats(settings.in_channels, size, size),
        "timestep": TensorType((batch,), DType.FLOAT32),
        "encoder_hidden_states": floats(request.sequence, settings.cross_attention_dim),
    }
    if settings.addition_embed_type == "text_time":
        known = settings.projection_class_embeddings_input_dim - _SIZE_NUMBERS * settings.addition_time_embed_dim
        types |= {"text_embeds": floats(known), "time_ids": floats(_SIZE_NUMBERS)}
    return types
