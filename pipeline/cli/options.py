"""Options that several commands share. Importing them loads neither pydantic nor the configuration."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from nxpipe.pipeline.artifacts.store_url import VARIABLE
from nxpipe.pipeline.cli.param_types import Choice, DurationType
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.files import write_whole

_Function = TypeVar("_Function", bound=Callable[..., Any])

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default="nxpipe.toml",
    envvar="NXPIPE_CONFIG",
    show_default=True,
    show_envvar=True,
    metavar="PATH",
    help="The configuration file.",
)

store_option = click.option(
    "--store",
    metavar="URL",
    help=f"The store: a folder, or s3://bucket/prefix.  [default: {VARIABLE}, then [store] url of nxpipe.toml]",
)


html_option = click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with charts; it needs no network.",
)


def write_page(path: Path, page: bytes, console: Console) -> None:
    write_whole(path, page)
    console.say(f"  page: {path}")


class Label(click.ParamType[str]):
    """The name of a channel or a pin, which is a component of a path."""

    name = "NAME"

    def __init__(self, noun: str) -> None:
        self._noun = noun

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch("[a-z0-9][a-z0-9-]{0,62}", str(value)):
            valid = re.sub("[^a-z0-9-]+", "-", str(value).lower()).strip("-")[:63]
            hint = f"; did you mean {valid!r}?" if valid else ""
            self.fail(
                f"{value!r} is not a valid {self._noun} name: 1 to 63 of a-z, 0-9 and -, not beginning with -{hint}",
                param,
                ctx,
            )
        return str(value)


KINDS: Final = ("emulated", "instructions", "xla", "device")  # of evidence; artifact_store.evidence loads pydantic

DEVICES: Final = ("auto", "nrtpy", "libnrt")  # of pipeline.verify.device, which loads the store

device_option = click.option(
    "--device",
    type=Choice(DEVICES),
    is_flag=False,
    flag_value="auto",
    help="Use the artifact's NEFFs on this machine's Neuron devices, by this library; auto, or no value: nrtpy if it "
    "is installed, else libnrt.",
)


limit_option = click.option(
    "--limit",
    type=DurationType(1, unit="s"),
    default="15m",
    show_default=True,
    help="On devices: end all ranks if one of them makes no progress for so long.",
)


def require_device_for_limit(ctx: click.Context, device: str | None) -> None:
    """Refuse a limit of ranks where no rank runs."""
    if device is None and ctx.get_parameter_source("limit") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--limit is of the ranks on devices; pass --device too", ctx)


def require_device_options(ctx: click.Context, artifact: str | None) -> None:
    """Refuse what --device cannot be combined with: a model that is not built, and options of the emulator."""
    if artifact is None:
        raise click.UsageError(
            "--device runs the NEFFs of an artifact; build one with --backend neuronx, and pass ARTIFACT", ctx
        )
    require_emulator_options(ctx)


def require_emulator_options(ctx: click.Context) -> None:
    """Refuse options of the emulator beside --device."""
    for name, option in (("mode", "--mode"), ("engine_order", "--engine-order")):
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--device and {option} cannot be combined: {option} is of the emulator", ctx)


minute_option = click.option(
    "--minute",
    type=Choice(("1", "5", "10", "30", "60")),
    default="60",
    show_default=True,
    metavar="SECONDS",
    help="The length of a minute. Fewer than 60 seconds are for rehearsals: load balancers count per minute.",
)
without_evidence_option = click.option(
    "--without-evidence",
    "without",
    multiple=True,
    type=Choice(KINDS),
    metavar="KIND",
    help="Promote without this kind of evidence; repeatable. Requires --reason; the log records both.",
)


def require_reason(without: Sequence[str], reason: str) -> None:
    """Refuse a promotion without evidence that gives no reason for it."""
    if without and not reason:
        raise click.UsageError("--without-evidence requires --reason TEXT; the channel's log records both")


class OneLine(click.ParamType[str]):
    """One line of printable text, which is stored and shown on terminals."""

    name = "TEXT"

    def __init__(self, longest: int, *, empty: bool = False) -> None:
        self._longest = longest
        self._empty = empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not text.isprintable() or len(text) > self._longest or not (text or self._empty):
            least = 0 if self._empty else 1
            self.fail(f"the text must be one line of {least} to {self._longest} printable characters", param, ctx)
        return text


ACTOR = OneLine(512)
REASON = OneLine(4096, empty=True)


def key_option(signed: str) -> Callable[[_Function], _Function]:
    """--key: the signing key, and what it signs here."""
    return click.option(
        "--key",
        metavar="KEY",
        help=f"The key that signs {signed}: file:PATH or kms:ARN.  [default: NXPIPE_SIGNING_KEY, then [signing] key of "
        "nxpipe.toml]",
    )


public_key_option = click.option(
    "--public-key",
    "public_keys",
    multiple=True,
    metavar="KEY",
    help="A public key, as file:PATH of its PEM file, or kms:ARN; repeatable.  [default: the keys of [signing] in "
    "nxpipe.toml]",
)
