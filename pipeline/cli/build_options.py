"""The options of `nxpipe build` that say how, not what."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_args

import click

from nxpipe.pipeline.cli.parameters import Bytes, Seconds
from nxpipe.pipeline.config.sections import Backend, Build

_Function = TypeVar("_Function", bound=Callable[..., Any])
EXECUTORS = ("local", "ray", "batch")

# By whom, and how far: a release says so, too.
_MEANS = (
    click.option(
        "--keep-going", is_flag=True, help="After a failure, build all else that can be; the exit code says it."
    ),
    click.option(
        "--executor",
        type=click.Choice(EXECUTORS),
        help="Who compiles: processes of this machine, a Ray cluster, or the build farm on AWS Batch.  [default: what "
        "nxpipe.toml says, else local]",
    ),
    click.option(
        "--address", metavar="ADDRESS", help="The Ray cluster, such as HOST:6379.  [default: one on this machine]"
    ),
    click.option(
        "--jobs",
        type=click.IntRange(1, 1024),
        help="How many cells at once.  [default: by the processors and the memory at hand]",
    ),
    click.option(
        "--timeout", type=Seconds(), help="When one cell is given up.  [default: what nxpipe.toml says, else 2h]"
    ),
    click.option("--memory-limit", type=Bytes(), help="How much memory one cell may take.  [default: no limit]"),
    click.option(
        "--retries",
        type=click.IntRange(0, 100),
        default=2,
        show_default=True,
        help="How often a cell is tried again after what may pass: a full disk, a network, a worker that was killed.",
    ),
)
_OPTIONS = (
    click.option("--dry-run", is_flag=True, help="Say what would be done, why and for about how long; do nothing."),
    click.option(
        "--force",
        is_flag=True,
        help="Build even what the store holds, whose bytes must come out equal, or remembers as a failure.",
    ),
    click.option("--resume", is_flag=True, help="Say the words of the last build again that was not finished."),
    *_MEANS,
    click.option(
        "--backend",
        type=click.Choice(get_args(Backend)),
        help=f"{Build.model_fields['backend'].description}  [default: what nxpipe.toml says, else emulator]",
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
