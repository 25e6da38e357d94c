"""How large a cell is beside others, and what memory it may take: from its configuration alone, in microseconds.

Rough on purpose. It decides which cell goes first and how many go at once, never what is made.
"""

from collections.abc import Mapping
from typing import Final

from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.shapes import Shape

_ALONE: Final = 900 << 20  # bytes of a worker with its libraries and a small model, as measured on two small encoders
_PER_PARAMETER: Final = 12  # bytes: fp32 weights, the emulator's rounded copy, and the reference's
_BASE: Final = 5e9  # multiply-adds that take as long as what every cell takes: capture, passes, a program's check
LITTLE: Final = 4 * _BASE  # no more than this is done sooner here than another process has its libraries at hand


def parameters_of(config: Mapping[str, object]) -> int:
    """About how many weights a transformer of these sizes has; parts of a composite are added up."""
    parts = (part for name, part in config.items() if name.endswith("_config"))
    inner = sum(parameters_of(part) for part in parts if isinstance(part, Mapping))
    hidden = _first(config, "hidden_size", "d_model", "n_embd", "dim")
    if not hidden:
        return inner
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers") or 1
    wide = _first(config, "intermediate_size", "d_ff", "n_inner", "ffn_dim") or 4 * hidden
    experts = _first(config, "num_local_experts", "num_experts") or 1
    words = _first(config, "vocab_size")
    return inner + words * hidden + layers * (4 * hidden * hidden + 3 * experts * hidden * wide)


def work_of(request: BuildSpec, shape: Shape) -> float:
    """In multiply-adds of one run, and what no program goes without."""
    tokens = shape.batch * (1 if shape.phase == "decode" else shape.sequence)
    hidden = _first(request.source.config, "hidden_size", "d_model", "n_embd", "dim")
    attention = tokens * shape.sequence * hidden
    return _BASE + (parameters_of(request.source.config) + attention / max(tokens, 1)) * tokens


def memory_of(request: BuildSpec) -> int:
    """Bytes that a worker on one of its cells may take."""
    return _ALONE + (_PER_PARAMETER * parameters_of(request.source.config) if request.verified else 0)


def _first(config: Mapping[str, object], *names: str) -> int:
    """The first of these sizes that the configuration states."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
