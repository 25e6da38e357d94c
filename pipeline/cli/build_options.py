"""The options of build and release that say how jobs run: where, how many at once, and what a failure ends."""

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, Final, TypeVar

import click

from nxpipe.pipeline.build.options import BuildOptions
from nxpipe.pipeline.cli.param_types import Bytes, Seconds

_Function = TypeVar("_Function", bound=Callable[..., Any])
EXECUTORS: Final = ("local", "ray", "batch")

_OPTIONS: Final = (
    click.option(
        "--keep-going", is_flag=True, help="After a failure, build every other cell; the exit code reports the failure."
    ),
    click.option(
        "--executor",
        type=click.Choice(EXECUTORS),
        help="Compile in processes of this machine, on a Ray cluster, or on the build farm in AWS Batch.  [default: "
        "[build] executor of nxpipe.toml, else local]",
    ),
    click.option("--address", metavar="ADDRESS", help="The Ray cluster, as HOST:PORT.  [default: one on this machine]"),
    click.option(
        "--jobs",
        type=click.IntRange(1, 1024),
        help="The number of cells to build in parallel.  [default: by available processors and memory]",
    ),
    click.option(
        "--timeout",
        type=Seconds(),
        help="The time limit of one cell.  [default: [build] timeout of nxpipe.toml, else 2h]",
    ),
    click.option("--memory-limit", type=Bytes(), help="The memory limit of one cell.  [default: no limit]"),
    click.option(
        "--retries",
        type=click.IntRange(0, 100),
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
