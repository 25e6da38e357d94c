"""Limits on the modules and buffers that an untrusted configuration may make a library allocate, without connections.

Parameters are on the meta device and take no memory. Modules, which Python creates one by one, and buffers, which get
their real values, take time and memory. The settings do not reveal all of it beforehand, so modules are counted while
the model is built.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch.nn.modules import module as torch_modules
from transformers.utils.hub import constants

from nxpipe.emulator.configuration import oversized, remote_references
from nxpipe.emulator.errors import CaptureError

# The largest published model has 165,000: 61 layers of 384 experts with three matrices each.
_MOST_MODULES = 250_000
# Rotary frequencies and position ids take kilobytes; a causal mask of 2,048 positions in each of 48 layers 200 MB.
_MOST_BUFFER_BYTES = 4 << 30
# Elements of a sinusoidal table, which transformers computes in Python; published tables have up to 4,194,304.
_MOST_SINES = 1 << 24
_OFFLINE_SETTINGS = ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_IMPLICIT_TOKEN")


def require_modest_settings(config: Mapping[str, object]) -> None:
    """Raise CaptureError for sizes above the limits and for references to models that a library would download."""
    violation = next(oversized(config), None)
    if violation is not None:
        raise CaptureError(f"config.json: {violation}; correct the configuration")
    for key, name in remote_references(config):
        raise CaptureError(
            f"config.json: {key} names another model, {name[:80]!r}, which is never fetched; write that model's own "
            "configuration there, as backbone_config"
        )


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the modules and parameters of a model built inside, and keep libraries from the hub and from looking up its
    token: that would read the user's file, or exchange a token, before the hub is found to be offline."""
    parts = 0

    def count(owner: Any, name: str, part: Any) -> None:
        nonlocal parts
        parts += 1
        if parts > _MOST_MODULES:
            raise CaptureError(
                f"the configuration describes a model of more than {_MOST_MODULES:,} modules and parameters; correct "
                "its numbers of layers and experts"
            )
        if part is not None and "Sinusoidal" in type(owner).__name__:
            _require_modest_table(name, part)

    hooks = [
        torch_modules.register_module_module_registration_hook(count),
        torch_modules.register_module_parameter_registration_hook(count),
    ]
    before = {name: getattr(constants, name) for name in _OFFLINE_SETTINGS}
    for name in _OFFLINE_SETTINGS:
        setattr(constants, name, True)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)
        for hook in hooks:
            hook.remove()


def require_modest_buffers(model: Any) -> None:
    """Raise CaptureError for buffers above the limits, before their values are computed."""
    sizes = {name: buffer.numel() * buffer.element_size() for name, buffer in model.named_non_persistent_buffers()}
    if sum(sizes.values()) > _MOST_BUFFER_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise CaptureError(
            f"the buffers of {type(model).__name__} take {sum(sizes.values()):,} bytes, {largest!r} alone "
            f"{sizes[largest]:,}, and at most {_MOST_BUFFER_BYTES:,} are supported; correct the configuration"
        )
    if any("sinusoidal" in name and bool(value) for name, value in vars(model.config).items()):
        for name, parameter in model.named_parameters():
            if "position" in name:
                _require_modest_table(name, parameter)


def _require_modest_table(name: str, table: Any) -> None:
    if hasattr(table, "numel") and table.numel() > _MOST_SINES:
        raise CaptureError(
            f"the table of sines {name!r} has {table.numel():,} elements, and at most {_MOST_SINES:,} are supported; "
            "correct the number of positions in the configuration"
        )
