"""A model cut to its first layers, by its configuration alone."""

from collections.abc import Mapping

from pipeline.errors import ModelSourceError

# How the families of models call their number of layers.
_DEPTHS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
)


def first_layers(config: Mapping[str, object], count: int) -> dict[str, object]:
    """The configuration of the first `count` layers; what it says of each layer (`layer_types`) is cut with them."""
    depths = {value for key, value in config.items() if key in _DEPTHS and isinstance(value, int)}
    inner = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)}
    cut = {key: first_layers(value, count) for key, value in inner.items() if _has_depth(value)}
    if not depths and not cut:
        raise ModelSourceError("--slice-layers: the configuration does not say how many layers the model has")
    sliced = dict(config) | cut
    for key, value in config.items():
        if key in _DEPTHS and isinstance(value, int):
            sliced[key] = min(value, count)
        elif isinstance(value, list) and len(value) in depths:
            sliced[key] = value[:count]
    return sliced


def _has_depth(config: Mapping[str, object]) -> bool:
    return any(isinstance(config.get(key), int) for key in _DEPTHS)
