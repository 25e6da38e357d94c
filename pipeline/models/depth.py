"""A model cut to its first layers, by its configuration alone."""

from collections.abc import Mapping
from typing import Final

from nxpipe.pipeline.util.errors import ModelSourceError

# How the families of models call their number of layers.
_DEPTHS: Final = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)
# Models in stages say how many layers each stage has.
_STAGES: Final = ("depths", "layers_per_block")
# Lists that describe the convolutions in front of the layers.
_IN_FRONT: Final = "conv_"


def first_layers(config: Mapping[str, object], count: int) -> dict[str, object]:
    """The configuration of the first `count` layers, of each stage where a model has stages.

    What it says of each layer (`layer_types`) is cut with them.
    """
    depths = {value for key, value in config.items() if key in _DEPTHS and isinstance(value, int)}
    inner = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)}
    cut: dict[str, object] = {key: first_layers(value, count) for key, value in inner.items() if _has_depth(value)}
    cut |= {key: _at_most(value, count) for key, value in config.items() if key in _STAGES}
    if "attention_types" in config:
        cut["attention_types"] = _first_of_runs(config["attention_types"], count)
    if not depths and not cut:
        raise ModelSourceError("--slice-layers: the configuration does not say how many layers the model has")
    sliced = dict(config) | cut
    for key, value in config.items():
        if key in _DEPTHS and isinstance(value, int):
            sliced[key] = min(value, count)
        elif isinstance(value, list) and len(value) in depths and key not in cut and not key.startswith(_IN_FRONT):
            sliced[key] = value[:count]
    return sliced


def _at_most(layers: object, count: int) -> object:
    """A number of layers, or one for each stage or part of a stage."""
    if isinstance(layers, list | tuple):
        return [_at_most(each, count) for each in layers]
    return min(layers, count) if isinstance(layers, int) else layers


def _first_of_runs(runs: object, count: int) -> object:
    """What GPT-Neo says of its layers: a pattern, and how often it is repeated."""
    match runs:
        case [[list(pattern), int(times)]]:
            return [[(pattern * times)[:count], 1]]
    return runs


def _has_depth(config: Mapping[str, object]) -> bool:
    return any(isinstance(config.get(key), int) for key in _DEPTHS) or any(key in config for key in _STAGES)
