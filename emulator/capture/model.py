"""Transformers model without weights: parameters on the meta device, initialized buffers, and its tensor-parallel
plan."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from transformers.utils.hub import OfflineModeIsEnabled

from nxpipe.emulator.capture.budget import bounded, require_modest_buffers, require_modest_settings
from nxpipe.emulator.capture.constants import Portable
from nxpipe.emulator.capture.dispatch import call_for_model
from nxpipe.emulator.capture.image_models import DIFFUSION, bind_patch_grid, build_diffusion_model
from nxpipe.emulator.capture.provenance import failure_details
from nxpipe.emulator.capture.request import TASKS, CaptureRequest
from nxpipe.emulator.configuration import quantised, relevant
from nxpipe.emulator.errors import CaptureError
from nxpipe.emulator.ir.types import DType, TensorType

# Settings of training or of eager execution, which a static capture overrides.
_OVERRIDDEN = {"dtype": None, "torch_dtype": None, "use_cache": False, "return_dict": True}
_SWITCHED_OFF = {"output_attentions": False, "output_hidden_states": False}
# Implementations of attention and experts, in the model and its parts: None selects transformers' default.
_DEFAULT_IMPLEMENTATIONS = {"attn_implementation": None, "experts_implementation": None}
# Second auto class of a task: speech recognition is either sequence-to-sequence or CTC.
_SECOND_CLASSES = {"AutoModelForSpeechSeq2Seq": "AutoModelForCTC"}


def build_model(request: CaptureRequest) -> Any:
    """The model in its own class, in evaluation mode."""
    if request.task in DIFFUSION:
        return build_diffusion_model(request)
    config = _configuration(request.config)
    model = instantiate(_model_class(request.task, config), config, request.dtype)
    bind_patch_grid(model, request.batch)
    return model


def instantiate(kind: Any, config: Any, dtype: str) -> Any:
    """A model of this class and configuration, with transformers' default implementations: fused attention where the
    model supports it, and all experts in one grouped matmul. Implementations saved in the configuration are ignored.
    """
    try:
        with quiet_libraries(), bounded(), torch.device("meta"), torch.no_grad():
            model = kind._from_config(
                _own_configuration(kind, config), dtype=getattr(torch, dtype), **_DEFAULT_IMPLEMENTATIONS
            ).eval()
        initialize_buffers(model)
        return model
    except (CaptureError, MemoryError):
        raise
    except Exception as fault:  # third-party code may raise any exception
        raise CaptureError(
            f"{kind.__name__} cannot be built from this configuration: {first_paragraph(fault)}{failure_details(fault)}"
        ) from fault


def _own_configuration(kind: Any, config: Any) -> Any:
    """The nested configuration for this class, if the configuration is composite; otherwise the configuration."""
    own = getattr(kind, "config_class", None)
    nested = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return next((part for part in nested if own and type(part) is own and type(config) is not own), config)


def first_paragraph(fault: Exception) -> str:
    """The first paragraph of an error's message, on one line."""
    paragraph = next((part for part in str(fault).split("\n\n") if part.strip()), type(fault).__name__)
    return " ".join(paragraph.split())


def _configuration(document: Mapping[str, object]) -> Any:
    require_modest_settings(document)
    settings = {key: value for key, value in relevant(document).items() if key not in _OVERRIDDEN}
    kind = settings.pop("model_type", None)
    if not isinstance(kind, str):
        raise CaptureError("the configuration names no model_type; pass the config.json of a Hugging Face model")
    if kind not in transformers.CONFIG_MAPPING:
        raise CaptureError(f"model_type {kind!r} is unknown to transformers {transformers.__version__}")
    if quantised(settings):
        raise CaptureError("the configuration is of a quantised checkpoint; pass that of the original model")
    changes = {key: value for key, value in (_OVERRIDDEN | _SWITCHED_OFF).items() if value is not None}
    try:
        with quiet_libraries(), bounded():
            config = transformers.AutoConfig.for_model(kind, **(settings | changes))
            disable_caches(config)
            return config
    # PermissionError: in a confined process the hub's cache is unreadable, and no other file is opened here.
    except (OfflineModeIsEnabled, PermissionError) as fault:
        raise CaptureError(
            "the configuration names a part by its id on the hub, which is never fetched; write that model's own "
            "configuration there, as backbone_config"
        ) from fault
    except Exception as fault:  # transformers validates with several libraries' exceptions
        reason = " ".join(str(fault).split())
        raise CaptureError(f"transformers rejects this {kind!r} configuration: {reason}") from fault


def disable_caches(config: Any) -> None:
    """Set `use_cache = False` in all nested configurations, each of which has its own setting."""
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            part.use_cache = False
            disable_caches(part)


def _model_class(task: str, config: Any) -> Any:
    auto = TASKS[task]
    for name in (auto, _SECOND_CLASSES.get(auto)):
        mapping = getattr(transformers, name)._model_mapping if name else {}
        if type(config) in mapping:
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    raise CaptureError(f"transformers has no {task} model of type {config.model_type!r}")


def initialize_buffers(model: Any) -> None:
    """Compute the non-persistent buffers, such as position ids and rotary frequencies.

    Models fill them in `_init_weights`, because `from_pretrained` builds on the meta device too. They are filled with
    poison first, so that a buffer that the model leaves uninitialized is detected.
    """
    require_modest_buffers(model)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    poisoned = {name: _poison(buffer) for name, buffer in model.named_non_persistent_buffers()}
    for name, buffer in poisoned.items():
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._buffers[attribute] = buffer
    with quiet_libraries(), Portable():
        model.initialize_weights()
    for name, buffer in model.named_non_persistent_buffers():
        if torch.equal(buffer.nan_to_num(), _poison(buffer).nan_to_num()) and buffer.numel():
            raise CaptureError(f"{type(model).__name__} does not initialise its buffer {name!r} in _init_weights")


def _poison(buffer: Any) -> Any:
    """A buffer filled with NaN or the smallest integer, which no model computes."""
    if buffer.dtype is torch.bool:
        return torch.zeros_like(buffer, device="cpu")
    worst = float("nan") if buffer.is_floating_point() or buffer.is_complex() else torch.iinfo(buffer.dtype).min
    return torch.full_like(buffer, worst, device="cpu")


def weight_types(request: CaptureRequest) -> dict[str, TensorType]:
    """The types of the tensors in the model's checkpoint, by name; tied weights have one entry."""
    model = build_model(request)
    stored = stored_names(model)
    persistent = set(model.state_dict())
    weights = [*model.named_parameters(), *model.named_buffers()]
    return {stored.get(name, name): tensor_type(tensor) for name, tensor in weights if name in persistent}


def stored_names(module: Any) -> dict[str, str]:
    """Parameter name to the name in the checkpoint; tied parameters share the name of the one they are tied to."""
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    chosen: dict[int, str] = {}
    for name, parameter in parameters:
        known = chosen.setdefault(id(parameter), name)
        if known in tied and name not in tied:
            chosen[id(parameter)] = name
    return {name: chosen[id(parameter)] for name, parameter in parameters}


def tensor_type(tensor: Any) -> TensorType:
    """The graph type of a PyTorch tensor; ValueError for an unsupported element type."""
    return TensorType(tuple(int(size) for size in tensor.shape), DType(str(tensor.dtype).removeprefix("torch.")))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress transformers' warnings, which do not apply to compiled programs."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def published_plan(request: CaptureRequest) -> tuple[tuple[str, str], ...]:
    """The model's tensor-parallel plan: sorted (pattern of modules or parameters, style) pairs; empty without a plan.

    Models of diffusers have no plan.
    """
    return call_for_model(tuple, "published_plan", request)


def published_plan_in_process(request: CaptureRequest) -> tuple[tuple[str, str], ...]:
    """`published_plan` in this process, without confinement."""
    plan: dict[str, str] = dict(getattr(build_model(request), "tp_plan", None) or {})
    return tuple(sorted(plan.items()))
