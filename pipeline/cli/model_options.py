"""The options by which build, check, verify and explain name a model and its programs, and the orders they become."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from click.core import ParameterSource

from nxpipe.pipeline.cli.param_types import Numbers, Phases, Target
from nxpipe.pipeline.config import Config, Model
from nxpipe.pipeline.config.models import Autocast, AutocastType, Task
from nxpipe.pipeline.order import Order
from nxpipe.pipeline.util.text import did_you_mean

_Function = TypeVar("_Function", bound=Callable[..., Any])


def order_options(
    does: str,
    *,
    target: click.ParamType[Any] | None = None,
    tp: int | str | None = 1,
    degrees: click.ParamType[Any] | None = None,
) -> Callable[[_Function], _Function]:
    """All of them; `does` is the command's verb, `tp` its degree when none is given, or its `degrees`."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(_options(does, target or Target(), tp, degrees or click.IntRange(1, 64))):
            function = option(function)
        return function

    return decorate


def _options(
    does: str, target: click.ParamType[Any], tp: int | str | None, degrees: click.ParamType[Any]
) -> list[Callable[[Any], Any]]:
    return [*_models(does), *_device(target, tp, degrees), *_PROGRAMS, *_NUMERICS, *_WEIGHTS]


def _models(does: str) -> Sequence[Callable[[Any], Any]]:
    return (
        click.option(
            "--model-id",
            metavar="ID|FOLDER|FILE",
            help=f"{does.capitalize()} this model instead of those in nxpipe.toml: a hub id, a folder, or a .pt2 or "
            ".onnx file.",
        ),
        click.option(
            "--only",
            "names",
            multiple=True,
            metavar="NAME",
            help=f"{does.capitalize()} only this model of nxpipe.toml; may be repeated.",
        ),
        click.option(
            "--task", type=click.Choice(get_args(Task)), help=f"{_field('task')}  [default: what config.json names]"
        ),
    )


def _device(
    target: click.ParamType[Any], tp: int | str | None, degrees: click.ParamType[Any]
) -> Sequence[Callable[[Any], Any]]:
    return (
        click.option("--target", type=target, default="inf2.xlarge", show_default=True, help=_field("target")),
        click.option(
            "--tp",
            type=degrees,
            default=tp,
            show_default=bool(tp) or "the smallest that fits",
            help=_field("tp"),
        ),
    )


def _field(name: str) -> str:
    """What the configuration says of the same thing."""
    return str(Model.model_fields[name].description)


_PROGRAMS: Final = (
    click.option("--batches", type=Numbers(1024), default="1", show_default=True, help=_field("batches")),
    click.option(
        "--buckets",
        type=Numbers(131072),
        show_default="128, or as many as the model knows",
        help=_field("buckets"),
    ),
    click.option("--phases", type=Phases(), help=f"{_field('phases')}  [default: by task]"),
)
_NUMERICS: Final = (
    click.option(
        "--autocast",
        "--auto-cast",
        type=click.Choice(get_args(Autocast)),
        default="matmult",
        show_default=True,
        help=_field("autocast"),
    ),
    click.option(
        "--autocast-type",
        "--auto-cast-type",
        type=click.Choice(get_args(AutocastType)),
        default="bf16",
        show_default=True,
        help=_field("autocast_type"),
    ),
)
_WEIGHTS: Final = (
    click.option(
        "--weights",
        metavar="random:SEED|hub|FOLDER",
        help=f"{_field('weights')}  [default: the folder's own, or the hub's]",
    ),
    click.option("--revision", metavar="REV", help=_field("revision")),
)


def refuse_words_without_effect(ctx: click.Context, model_id: str | None, flags: dict[str, Any]) -> None:
    """nxpipe.toml says everything of its models; a flag that it would overrule in silence is a mistake."""
    typed = [name for name in flags if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if typed and model_id is None:
        option = "--" + typed[0].replace("_", "-")
        raise click.UsageError(f"{option} goes with --model-id; for the models of nxpipe.toml, the file says it", ctx)
    if model_id is not None and ctx.params["names"]:
        raise click.UsageError("--only names models of nxpipe.toml, and --model-id another; pass one of them", ctx)


def orders(
    model_id: str | None, flags: dict[str, Any], config: Config, names: Sequence[str], root: Path
) -> list[Order]:
    """The model of the command line, else those of nxpipe.toml, in its order."""
    if model_id is not None:
        return [Order.from_flags(model_id, flags)]
    return [Order.from_config(model, root) for model in chosen_models(config, names)]


def chosen_models(config: Config, names: Sequence[str]) -> list[Model]:
    """Those that `--only` names, else all."""
    known = [model.name for model in config.models]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise click.BadParameter(f"nxpipe.toml describes no model {name!r}{hint}", param_hint="--only")
    return [model for model in config.models if not names or model.name in names]
