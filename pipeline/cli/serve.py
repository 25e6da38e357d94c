"""`nxpipe serve`: an HTTP server over an artifact's programs; and the choice of an artifact, also for `generate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import execution_options
from nxpipe.pipeline.cli.options import (
    config_option,
    device_option,
    limit_option,
    require_device_for_limit,
    require_emulator_options,
    store_option,
)
from nxpipe.pipeline.cli.param_types import Choice, Count, DurationType, Share
from nxpipe.pipeline.serving.text import require_serving_libraries
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.verify.execution import ExecutionOptions

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.serving.encoder import Pooling
    from nxpipe.pipeline.serving.engine import Limits
    from nxpipe.pipeline.serving.model import ServingModel
    from nxpipe.pipeline.serving.server import Served
    from nxpipe.pipeline.verify.device import DeviceOptions

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SERVER = ("starlette", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class ArtifactChoice:
    """The artifact that a command line names: by its name, by a channel, or by a fetched folder."""

    name: str | None
    channel: str | None
    model: str | None
    target: str | None
    folder: Path | None
    store: str | None
    config_path: Path

    def require_one(self, ctx: click.Context) -> None:
        if sum(each is not None for each in (self.name, self.channel, self.folder)) != 1:
            raise click.UsageError("pass one of ARTIFACT, --channel and --folder", ctx)
        if self.channel is None and (self.model or self.target):
            raise click.UsageError("--model and --target require --channel", ctx)

    @contextmanager
    def open(self, console: Console, machine: "ExecutionOptions | DeviceOptions") -> "Iterator[ServingModel]":
        """The artifact on the emulator or on this machine's devices."""
        from nxpipe.pipeline.artifacts.store_url import open_configured_store
        from nxpipe.pipeline.serving.model import folder_model, served_model
        from nxpipe.pipeline.util.progress import watching

        if self.folder is not None:
            yield folder_model(self.folder, machine, console.step)
            return
        store = open_configured_store(self.store, self.config_path, console)
        published = self._published(store, console)
        with served_model(published, store, machine, console.step, partial(watching, console)) as model:
            yield model

    def _published(self, store: "Store", console: Console) -> "Published":
        if self.channel is None:
            return store.resolve(self.name or "")
        from nxpipe.pipeline.artifacts.lookup import served_by

        selection = served_by(self.channel, self.model, self.target, store, self.config_path, console.say)
        return store.resolve(selection.manifest.request_key)


def choice_options(verb: str) -> Callable[[_Function], _Function]:
    """--channel, --model, --target and --folder, by which a command finds an artifact that is not named."""
    options = (
        click.option("--channel", metavar="NAME", help=f"{verb} the artifact of this channel."),
        click.option("--model", metavar="ID", help="With --channel: the artifact of this model."),
        click.option("--target", help="With --channel: the artifact for this target, as in inf2."),
        click.option(
            "--folder",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help=f"{verb} the artifact in this folder, as `nxpipe store fetch` writes it.",
        ),
    )
    return lambda function: reduce(lambda command, option: option(command), reversed(options), function)


@click.command(cls=Command)
@click.argument("artifact", required=False, shell_complete=complete_artifacts)
@choice_options("Serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", type=Count(0, 65535), default=8000, show_default=True, help="The port; 0: a free one.")
@click.option(
    "--name",
    "names",
    multiple=True,
    metavar="NAME",
    help="The model's name in requests; repeatable.  [default: its id]",
)
@click.option(
    "--rows", type=Count(1), metavar="N", help="Serve the programs of this batch size.  [default: the largest]"
)
@click.option(
    "--copies",
    type=Count(1),
    default=1,
    show_default=True,
    help="Copies of the model, each on cores of its own.",
)
@click.option(
    "--max-waiting",
    type=Count(1),
    default=256,
    show_default=True,
    metavar="N",
    help="Requests that may wait for a row; others get 429.",
)
@click.option(
    "--max-tokens",
    type=Count(1),
    metavar="N",
    help="Tokens of one request, prompt and answer.  [default: the KV cache's]",
)
@click.option(
    "--request-timeout",
    type=DurationType(unit="s"),
    help="End a request that takes longer.  [default: none]",
)
@click.option(
    "--drain-delay",
    type=DurationType(zero=True, unit="s"),
    default="1s",
    show_default=True,
    help="After SIGTERM: answer new requests for so long, while /readyz fails.",
)
@click.option(
    "--drain-timeout",
    type=DurationType(zero=True, unit="s"),
    default="30s",
    show_default=True,
    help="After SIGTERM: wait so long for accepted requests.",
)
@click.option(
    "--keep-alive",
    type=DurationType(1, unit="s"),
    default="75s",
    show_default=True,
    help="Close a connection without requests after this time; longer than the load balancer's idle timeout.",
)
@click.option(
    "--pooling",
    type=Choice(["mean", "cls", "last"]),
    default="mean",
    show_default=True,
    help="How tokens become an embedding.",
)
@click.option("--shadow", metavar="URL", help="Send a copy of each generation request to this server, and compare.")
@click.option(
    "--shadow-record",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="With --shadow: record pairs of answers, and minutes for the canary judge, in this folder.",
)
@click.option(
    "--shadow-control",
    envvar="NXPIPE_SHADOW_CONTROL",
    show_envvar=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Mirror as this JSON file says, which is read again every second; by default as the agent of a fleet says.",
)
@click.option(
    "--shadow-match",
    type=Share(),
    default="100%",
    show_default=True,
    help="The share of tokens before the first difference below which the second server's answer is bad.",
)
@execution_options
@device_option
@limit_option
@store_option
@config_option
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    artifact: str | None,
    channel: str | None,
    model: str | None,
    target: str | None,
    folder: Path | None,
    host: str,
    port: int,
    names: tuple[str, ...],
    rows: int | None,
    copies: int,
    max_waiting: int,
    max_tokens: int | None,
    request_timeout: float | None,
    drain_delay: float,
    drain_timeout: float,
    keep_alive: float,
    pooling: "Pooling",
    shadow: str | None,
    shadow_record: Path | None,
    shadow_control: Path | None,
    shadow_match: float,
    execution: ExecutionOptions,
    device: str | None,
    limit: float,
    store: str | None,
    config_path: Path,
) -> None:
    """Serve an artifact over HTTP, by OpenAI's API and SageMaker's.

    Endpoints: /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/classify, /invocations, /ping, /healthz,
    /readyz, /metrics. Programs run on the emulator, or with --device on
    this machine's Neuron devices. A model that generates text is batched continuously if it was built
    with --phases extend,decode; with prefill and decode it runs in batches that end together. On SIGTERM /readyz fails,
    accepted requests are answered, and the command exits with 0. Needs nxpipe[serve], and no PyTorch.

    \b
    Example:
      nxpipe serve my-llama@4e9ce0 --port 8000
      nxpipe serve --channel production --model my-llama --host 0.0.0.0
      curl localhost:8000/v1/completions -d '{"prompt": "The river", "max_tokens": 20}'
    """
    console: Console = ctx.obj
    choice = ArtifactChoice(artifact, channel, model, target, folder, store, config_path)
    choice.require_one(ctx)
    require_serving_libraries(*_SERVER)
    from nxpipe.pipeline.serving.engine import Limits
    from nxpipe.pipeline.serving.server import Server
    from nxpipe.pipeline.serving.shadow import ControlFile, Mirroring, Shadow

    if (shadow is None) != (shadow_record is None):
        raise click.UsageError("--shadow and --shadow-record belong together; pass both", ctx)
    limits = Limits(max_waiting, max_tokens, request_timeout)
    source: Mirroring | ControlFile | None = None
    if shadow is not None and shadow_record is not None:
        source = Mirroring((shadow,), shadow_record)
    elif shadow_control is not None:
        source = ControlFile(shadow_control)
    with choice.open(console, machine_of(ctx, execution, device, limit)) as read:
        with console.step("load the programs"):
            served = _served(read, names, rows, copies, limits, pooling)
        if source is not None:
            served.shadow = Shadow(source, shadow_match)
        server = Server(
            served, host=host, port=port, delay=drain_delay, drain_seconds=drain_timeout, keep_alive=keep_alive
        )
        if served.generation is not None and not served.generation.is_continuous:
            console.say("  requests run in batches that end together; --phases extend,decode batches continuously")
        server.run_until_signal(lambda url: console.say(f"  serving {served.names[0]} at {url}"))


def machine_of(
    ctx: click.Context, execution: ExecutionOptions, device: str | None, limit: float
) -> "ExecutionOptions | DeviceOptions":
    """Where programs run, by the options of a command."""
    require_device_for_limit(ctx, device)
    if device is None:
        return execution
    require_emulator_options(ctx)
    from nxpipe.pipeline.verify.device import DeviceOptions

    return DeviceOptions(device, limit=limit)


def _served(
    model: "ServingModel",
    names: tuple[str, ...],
    rows: int | None,
    copies: int,
    limits: "Limits",
    pooling: "Pooling",
) -> "Served":
    from nxpipe.pipeline.serving.encoder import Encoding
    from nxpipe.pipeline.serving.generation import Generation
    from nxpipe.pipeline.serving.metrics import Metrics
    from nxpipe.pipeline.serving.server import Served

    own = names or tuple(filter(None, (model.name, model.artifact)))
    if model.generates:
        schedulers = [model.scheduler(rows, copy) for copy in range(copies)]
        return Served(own, Metrics(), generation=Generation(model, schedulers, limits))
    encoding = Encoding(model, model.forward_session(), limits, pooling=pooling)
    return Served(own, Metrics(), encoding=encoding)
