"""The options that select a model and its programs, for build, check, explain, run and verify.

`model_options` adds them to a command, which receives their values as one `ModelOptions`. `execution_options` adds
--mode and --engine-order, for the commands that execute programs.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click
from click.core import ParameterSource

from nxpipe.emulator.errors import CompileError
from nxpipe.pipeline.build.jobs import BuildOptions
from nxpipe.pipeline.cli.completion import complete_models
from nxpipe.pipeline.cli.param_types import TASKS, Axis, Bytes, Choice, Count, DurationType, Numbers, Phases, Target
from nxpipe.pipeline.config import Config, Model
from nxpipe.pipeline.config.models import Autocast, AutocastType, Task
from nxpipe.pipeline.models.program_file import SavedProgram, UnknownAxis, is_saved
from nxpipe.pipeline.models.spec import ModelSpec, configured_models, spec_options
from nxpipe.pipeline.util.files import expanded
from nxpipe.pipeline.verify.execution import HOSTILE, ExecutionOptions, Mode

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Options that select programs or weights of a Hugging Face model. A .pt2 or .onnx file contains both.
_NOT_FOR_FILES: Final = ("task", "batches", "buckets", "phases", "weights", "revision")


@dataclass(frozen=True)
class ModelOptions:
    """The model of --model-id, or models of nxpipe.toml: those of --only, else all.

    `targets` and `degrees` have one item, or several where a command takes lists. `given` holds the names of the
    options that the user set.
    """

    model_id: str | None
    names: tuple[str, ...]
    task: str | None
    targets: tuple[str, ...]
    degrees: tuple[int | None, ...]
    batches: tuple[int, ...]
    buckets: tuple[int, ...] | None
    phases: tuple[str, ...] | None
    autocast: str
    autocast_type: str
    weights: str | None
    revision: str | None
    axes: tuple[tuple[str, int], ...]
    given: frozenset[str]

    def require_applicable(self) -> None:
        """Refuse options without effect: options of models in nxpipe.toml, shapes of a program file."""
        if self.model_id is None:
            if option := _first_option(spec_options(), self.given):
                raise _usage(f"{option} requires --model-id; models of nxpipe.toml take it from the file")
        elif self.names:
            raise _usage("--only selects models of nxpipe.toml and cannot be combined with --model-id")
        self._require_own_axes()

    def _require_own_axes(self) -> None:
        if self.model_id is None or not is_saved(self.model_id):
            if self.axes:
                raise _usage("--axis fixes dynamic axes of an ONNX file; pass one with --model-id FILE.onnx")
            return
        if option := _first_option(_NOT_FOR_FILES, self.given):
            raise _usage(
                f"{option} does not apply to {Path(self.model_id).name}, which has shapes and weights of its own; "
                "remove it, and fix dynamic axes of an ONNX file with --axis NAME=SIZE"
            )
        _require_one_size(self.axes)
        try:
            SavedProgram(expanded(self.model_id), dict(self.axes)).require_axes()
        except UnknownAxis as error:
            raise _usage(f"--axis: {error}") from error
        except CompileError:  # an unreadable file is reported when it is read
            pass

    def values(self) -> dict[str, Any]:
        """The values by the names that nxpipe.toml uses, for the first target and degree."""
        single = {"target": self.targets[0], "tp": self.degrees[0]}
        return single | {name: getattr(self, name) for name in spec_options() if name not in single}

    def build_values(self, backend: str | None, no_verify: bool) -> dict[str, Any]:
        """`values` with all targets and degrees, and the options of a build, for the build matrix."""
        build = {"model_id": self.model_id, "axes": self.axes, "backend": backend, "no_verify": no_verify}
        return self.values() | {"target": self.targets, "tp": self.degrees} | build

    def specs(self, config: Config, root: Path) -> list[ModelSpec]:
        """The model of --model-id, else those of nxpipe.toml in its order."""
        if self.model_id is not None:
            return [ModelSpec.from_options(self.model_id, self.values(), axes=self.axes)]
        return [ModelSpec.from_config(model, root) for model in configured_models(config, self.names)]


def _first_option(names: Sequence[str], set_options: frozenset[str]) -> str | None:
    """The first of the options that the user set, with its dashes."""
    return next(("--" + name.replace("_", "-") for name in names if name in set_options), None)


def _usage(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context(silent=True))


def _require_one_size(axes: Sequence[tuple[str, int]]) -> None:
    sizes: dict[str, int] = {}
    for name, size in axes:
        if sizes.setdefault(name, size) != size:
            raise _usage(f"--axis sets {name!r} to both {sizes[name]} and {size}; keep one")


def model_options(
    verb: str,
    *,
    target: click.ParamType[Any] | None = None,
    tp: int | str | None = 1,
    degrees: click.ParamType[Any] | None = None,
) -> Callable[[_Function], Any]:
    """Add the options to a command, which takes their values as `options`. `tp` is the default degree."""
    added = _options(verb.capitalize(), target or Target(), tp, degrees or Count(1, 64))

    def decorate(function: _Function) -> Any:
        @wraps(function)
        def command(*args: Any, **values: Any) -> Any:
            return function(*args, options=_take_options(values), **values)

        for option in reversed(added):
            command = option(command)
        return command

    return decorate


def _take_options(values: dict[str, Any]) -> ModelOptions:
    """Remove the values of these options from a command's values and return them."""
    context = click.get_current_context()
    names = ("model_id", "names", "axes", *spec_options())
    options = {name: values.pop(name) for name in names}
    set_options = [name for name in names if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    target, tp = options.pop("target"), options.pop("tp")
    return ModelOptions(
        targets=target if isinstance(target, tuple) else (target,),
        degrees=tp if isinstance(tp, tuple) else (tp,),
        given=frozenset(set_options),
        **options,
    )


def _options(
    verb: str, target: click.ParamType[Any], tp: int | str | None, degrees: click.ParamType[Any]
) -> list[Callable[[Any], Any]]:
    return [
        click.option(
            "--model-id",
            metavar="ID|FOLDER|FILE",
            help=f"{verb} this model instead of those in nxpipe.toml: a hub id, a folder, or a .pt2 or .onnx file.",
        ),
        click.option(
            "--only",
            "names",
            multiple=True,
            metavar="NAME",
            shell_complete=complete_models,
            help=f"{verb} this model of nxpipe.toml; repeatable.",
        ),
        click.option(
            "--task", type=Choice(get_args(Task), TASKS), help=f"{_field('task')}  [default: the task in config.json]"
        ),
        click.option("--target", type=target, default="inf2.xlarge", show_default=True, help=_field("target")),
        click.option(
            "--tp", type=degrees, default=tp, show_default=bool(tp) or "the smallest that fits", help=_field("tp")
        ),
        *_PROGRAMS,
    ]


def _field(name: str) -> str:
    """The description of the same key in nxpipe.toml."""
    return str(Model.model_fields[name].description)


_PROGRAMS: Final = (
    click.option("--batches", type=Numbers(1024), default="1", show_default=True, help=_field("batches")),
    click.option(
        "--buckets", type=Numbers(131072), show_default="128, at most the model's positions", help=_field("buckets")
    ),
    click.option("--phases", type=Phases(), help=f"{_field('phases')}  [default: by task]"),
    click.option(
        "--autocast",
        "--auto-cast",
        type=Choice(get_args(Autocast)),
        default="matmult",
        show_default=True,
        help=_field("autocast"),
    ),
    click.option(
        "--autocast-type",
        "--auto-cast-type",
        type=Choice(get_args(AutocastType)),
        default="bf16",
        show_default=True,
        help=_field("autocast_type"),
    ),
    click.option(
        "--weights",
        metavar="random:SEED|hub|FOLDER",
        help=f"{_field('weights')}  [default: the folder's own, or the hub's]",
    ),
    click.option("--revision", metavar="REV", help=_field("revision")),
    click.option(
        "--axis",
        "axes",
        multiple=True,
        type=Axis(),
        help="Fix a dynamic axis of an ONNX file, by the axis's name; repeatable.",
    ),
)


class _EngineOrder(click.ParamType[str]):
    name = "ORDER"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"program|hostile|random:[0-9]+", str(value)):
            self.fail(f"{value!r} is not program, hostile or random:SEED, as in random:7", param, ctx)
        return str(value)


def execution_options(function: _Function) -> Any:
    """Add --mode and --engine-order to a command, which takes them as `execution`."""

    @wraps(function)
    def command(*args: Any, **values: Any) -> Any:
        mode, order = values.pop("mode"), values.pop("engine_order")
        if order is not None and mode != "isa":
            raise _usage("--engine-order requires --mode isa, which executes the program on emulated cores")
        execution = ExecutionOptions(mode, order or HOSTILE)
        return function(*args, execution=execution, **values)

    order = click.option(
        "--engine-order",
        type=_EngineOrder(),
        metavar="ORDER",
        help="With --mode isa, the order of engines when several are ready: program (as written), hostile (as late as "
        f"the waits allow), or random:SEED. Outputs do not depend on it.  [default: {ExecutionOptions().order}]",
    )
    mode = click.option(
        "--mode",
        type=Choice(get_args(Mode)),
        default="fast",
        show_default=True,
        help="fast computes each operator in the engines' arithmetic; isa executes the program on emulated cores, "
        "instruction by instruction.",
    )
    return mode(order(command))


EXECUTORS: Final = ("local", "ray", "batch")

_OPTIONS: Final = (
    click.option(
        "--keep-going", is_flag=True, help="After a failure, build every other cell; the exit code reports the failure."
    ),
    click.option(
        "--executor",
        type=Choice(EXECUTORS),
        help="Compile in processes of this machine, on a Ray cluster, or on the build farm in AWS Batch.  [default: "
        "[build] executor of nxpipe.toml, else local]",
    ),
    click.option("--address", metavar="ADDRESS", help="The Ray cluster, as HOST:PORT.  [default: one on this machine]"),
    click.option(
        "--jobs",
        type=Count(1, 1024),
        help="The number of cells to build in parallel.  [default: by available processors and memory]",
    ),
    click.option(
        "--timeout",
        type=DurationType(),
        help="The time limit of one cell.  [default: [build] timeout of nxpipe.toml, else 2h]",
    ),
    click.option("--memory-limit", type=Bytes(), help="The memory limit of one cell.  [default: no limit]"),
    click.option(
        "--retries",
        type=Count(0, 100),
        default=BuildOptions.retries,
        show_default=True,
        help="Retries of a cell after a retryable failure: a full disk, a network error, a killed worker.",
    ),
)


def executor_options(function: _Function) -> Any:
    """Add the options to a command, which takes their values as `build_options`."""

    @wraps(function)
    def command(*args: Any, **values: Any) -> Any:
        names = [field.name for field in fields(BuildOptions) if field.name != "force"]
        chosen = BuildOptions(**{name: values.pop(name) for name in names})
        return function(*args, build_options=chosen, **values)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command
