"""The artifacts of a run: models x targets x degrees, from the words of the command line or of nxpipe.toml."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pipeline.building.asked import Asked, Backend
from pipeline.config import Config
from pipeline.config.models import Model
from pipeline.order import Order, words
from pipeline.order_options import chosen_models

WORDS: Final = tuple(words())


def asked_for(
    model_id: str | None,
    flags: Mapping[str, Any],
    config: Config,
    names: Sequence[str],
    root: Path,
    *,
    axes: tuple[tuple[str, int], ...],
    backend: Backend,
    verified: bool,
) -> tuple[Asked, ...]:
    """Each once, though it may have been asked for in two ways."""
    if model_id is not None:
        single = dict(flags) | {"target": flags["target"][0], "tp": flags["tp"][0]}
        first = Order.from_flags(model_id, single)
        pairs: list[tuple[str | None, Order]] = [(None, order) for order in _every(first, flags["target"], flags["tp"])]
    else:
        pairs = [(model.name, order) for model in chosen_models(config, names) for order in _all_of(model, root)]
    return tuple(dict.fromkeys(Asked(order, name, axes, backend, verified) for name, order in pairs))


def _all_of(model: Model, root: Path) -> Iterator[Order]:
    order = Order.from_config(model, root)
    yield order
    for variant in model.also:
        yield from _every(order, variant.targets, variant.tp)


def _every(order: Order, targets: Sequence[str], degrees: Sequence[int]) -> Iterator[Order]:
    for target in targets:
        for degree in degrees:
            yield replace(order, target=target, tp=degree)
