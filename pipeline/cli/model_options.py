"""Options that specify a model and how it runs, and the specifications they become."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from click.core import ParameterSource

from nxpipe.emulator.errors import CompileError
from nxpipe.pipeline.cli.parameters import Numbers, Phases, Target
from nxpipe.pipeline.config import Config, Model
from nxpipe.pipeline.config.models import Autocast, AutocastType, Task
from nxpipe.pipeline.models.program_file import SavedProgram, UnknownAxis, is_saved
from nxpipe.pipeline.models.spec import ModelSpec, configured_models, spec_options
from nxpipe.pipeline.util.folders import expanded
from nxpipe.pipeline.verify.execution import HOSTILE, ExecutionOptions, Mode

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LARGEST_AXIS: Final = 2**31 - 1  # the hardware counts elements in 32 bits
# Options that select among the programs of a Hugging Face model, or its weights; a program file has its own.
_MODEL_CLASS_OPTIONS: Final = ("task", "batches", "buckets", "phases", "weights", "revision")


def model_options(
    does: str,
    *,
    target: click.ParamType[Any] | None = None,
    tp: int | str | None = 1,
    degrees: click.ParamType[Any] | None = None,
) -> Callable[[_Function], _Function]:
    """All options of a model; `does` is the command's verb, `tp` its default degree, `degrees` the type of several."""

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
    """The description of the same key of nxpipe.toml."""
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


class _Axis(click.ParamType[tuple[str, int]]):
    """An open axis of an ONNX file, and its size."""

    name = "NAME=SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        name, _, size = str(value).rpartition("=")
        is_number = size.isascii() and size.isdecimal() and len(size) <= len(str(_LARGEST_AXIS))
        if not name or not is_number or not 1 <= int(size) <= _LARGEST_AXIS:
            self.fail(f"{value!r} is not an axis and its size up to {_LARGEST_AXIS:,}, as in batch=1", param, ctx)
        return name, int(size)


axis_option = click.option(
    "--axis",
    "axes",
    multiple=True,
    type=_Axis(),
    help="Fix an open axis of an ONNX file, by its name there; may be repeated.",
)


class _EngineOrder(click.ParamType[str]):
    name = "ORDER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"program|hostile|random:[0-9]+", str(value)):
            self.fail(f"{value!r} is none of program, hostile and random:SEED, as in random:7", param, ctx)
        return str(value)


def execution_options(command: _Function) -> _Function:
    """`--mode` and `--engine-order`, for `execution_of`."""
    order = click.option(
        "--engine-order",
        type=_EngineOrder(),
        metavar="ORDER",
        help="With --mode isa: the order of engines that may run at the same time: program (as written), hostile (the "
        f"least friendly order), or random:SEED. Answers are the same.  [default: {HOSTILE}]",
    )
    mode = click.option(
        "--mode",
        type=click.Choice(get_args(Mode)),
        default="fast",
        show_default=True,
        help="Run each operator by its numerics, or the program itself on emulated cores, instruction by instruction.",
    )
    return mode(order(command))


def execution_of(mode: Mode, order: str | None) -> ExecutionOptions:
    if order is not None and mode != "isa":
        raise click.UsageError("--engine-order applies to emulated cores; pass --mode isa too")
    return ExecutionOptions(mode, order or HOSTILE)


def check_model_options(ctx: click.Context, model_id: str | None, options: Mapping[str, Any]) -> None:
    """UsageError for an option without effect: beside a model of nxpipe.toml, and on a program file. `options` are
    those of the command that specify a model (`spec_options`), and `axes`."""
    typed = [name for name in spec_options() if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    typed = [name for name in typed if name in options]
    axes = options.get("axes", ())
    if typed and model_id is None:
        option = "--" + typed[0].replace("_", "-")
        raise click.UsageError(f"{option} needs --model-id; the models of nxpipe.toml have it in that file", ctx)
    if model_id is not None and ctx.params["names"]:
        raise click.UsageError("--only selects models of nxpipe.toml, and --model-id another; pass one of them", ctx)
    if model_id is None or not is_saved(model_id):
        if axes:
            raise click.UsageError("--axis fixes the open axes of an ONNX file; pass one by --model-id FILE.onnx", ctx)
        return
    unused = [name for name in typed if name in _MODEL_CLASS_OPTIONS]
    if unused:
        raise click.UsageError(
            f"--{unused[0].replace('_', '-')} has no effect on {Path(model_id).name}, a program with shapes and "
            "weights of its own; leave it out, and fix open axes of an ONNX file by --axis NAME=SIZE",
            ctx,
        )
    _require_axes(ctx, model_id, axes)


def _require_axes(ctx: click.Context, model_id: str, axes: Sequence[tuple[str, int]]) -> None:
    sizes: dict[str, int] = {}
    for name, size in axes:
        if sizes.setdefault(name, size) != size:
            raise click.UsageError(f"--axis gives {name!r} two sizes, {sizes[name]} and {size}; keep one", ctx)
    try:
        SavedProgram(expanded(model_id), sizes).require_axes()
    except UnknownAxis as error:
        raise click.UsageError(f"--axis: {error}", ctx) from error
    except CompileError:  # an unreadable file is reported by the command's own reading of it
        pass


def model_specs(
    model_id: str | None, options: Mapping[str, Any], config: Config, names: Sequence[str], root: Path
) -> list[ModelSpec]:
    """The model of the command line, else those of nxpipe.toml, in its order."""
    if model_id is not None:
        return [ModelSpec.from_options(model_id, options, axes=options.get("axes", ()))]
    return [ModelSpec.from_config(model, root) for model in configured_models(config, names)]
