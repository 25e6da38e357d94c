"""Options of `nxpipe build` that control its execution; those that specify the model are in model_options.py."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import click

from nxpipe.pipeline.cli.parameters import Bytes, Seconds
from nxpipe.pipeline.config.sections import Backend, Build

_Function = TypeVar("_Function", bound=Callable[..., Any])
EXECUTORS = ("local", "ray", "batch")

# A release has these too.
_MEANS = (
    click.option("--keep-going", is_flag=True, help="Go on after a failure; the exit code reports it."),
    click.option(
        "--executor",
        type=click.Choice(EXECUTORS),
        help="The executor: processes of this machine, a Ray cluster, or the build farm on AWS Batch.  [default: that "
        "of nxpipe.toml, else local]",
    ),
    click.option(
        "--address", metavar="ADDRESS", help="The Ray cluster, such as HOST:6379.  [default: one on this machine]"
    ),
    click.option(
        "--jobs",
        type=click.IntRange(1, 1024),
        help="Number of cells built at once.  [default: by processors and memory]",
    ),
    click.option("--timeout", type=Seconds(), help="Time limit of one cell.  [default: that of nxpipe.toml, else 2h]"),
    click.option("--memory-limit", type=Bytes(), help="Memory limit of one cell.  [default: none]"),
    click.option(
        "--retries",
        type=click.IntRange(0, 100),
        default=2,
        show_default=True,
        help="Retries of a cell after a retryable failure: a full disk, a network error, a killed worker.",
    ),
)
_OPTIONS = (
    click.option("--dry-run", is_flag=True, help="Print the plan with reasons and estimated times; build nothing."),
    click.option(
        "--force",
        is_flag=True,
        help="Build again what is cached, which must give equal bytes, or failed before.",
    ),
    click.option("--resume", is_flag=True, help="Repeat the arguments of the last unfinished build."),
    *_MEANS,
    click.option(
        "--backend",
        type=click.Choice(get_args(Backend)),
        help=f"{Build.model_fields['backend'].description}  [default: that of nxpipe.toml, else emulator]",
    ),
    click.option("--no-verify", is_flag=True, help="Publish without comparing the emulated output with PyTorch's."),
)


def build_options(function: _Function) -> _Function:
    return _with(_OPTIONS, function)


def means_options(function: _Function) -> _Function:
    return _with(_MEANS, function)


def _with(options: Sequence[Callable[[_Function], _Function]], function: _Function) -> _Function:
    for option in reversed(options):
        function = option(function)
    return function
