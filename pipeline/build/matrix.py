"""The artifacts of a run: models x targets x degrees, from the words of the command line or of nxpipe.toml."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxpipe.pipeline.build.asked import Asked, Backend
from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.models import Model, chosen_models
from nxpipe.pipeline.order import Order


def of_words(said: Mapping[str, Any], config: Config, names: Sequence[str], root: Path) -> tuple[Asked, ...]:
    """Those of a command line, which names a model of its own or leaves that to nxpipe.toml."""
    model_id, verified = said["model_id"], not said["no_verify"]
    if model_id is None:
        return of_file(config, names, root, backend=said["backend"], verified=verified)
    backend = said["backend"] or config.build.backend
    first = Order.from_flags(model_id, {**said, "target": said["target"][0], "tp": said["tp"][0]})
    every = _every(first, said["target"], said["tp"])
    return _each_once(Asked(order, None, said["axes"], backend, verified) for order in every)


def of_file(
    config: Config, names: Sequence[str], root: Path, *, backend: Backend | None = None, verified: bool = True
) -> tuple[Asked, ...]:
    """Those of nxpipe.toml, or of the models that are named, by the compiler that it names unless told otherwise."""
    return _each_once(
        Asked(order, model.name, (), backend or config.build.backend, verified)
        for model in chosen_models(config, names)
        for order in _all_of(model, root)
    )


def _each_once(asked: Iterable[Asked]) -> tuple[Asked, ...]:
    """Though it may have been asked for in two ways."""
    return tuple(dict.fromkeys(asked))


def _all_of(model: Model, root: Path) -> Iterator[Order]:
    order = Order.from_config(model, root)
    yield order
    for variant in model.also:
        yield from _every(order, variant.targets, variant.tp)


def _every(order: Order, targets: Sequence[str], degrees: Sequence[int]) -> Iterator[Order]:
    for target in targets:
        for degree in degrees:
            yield replace(order, target=target, tp=degree)
