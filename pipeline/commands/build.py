"""`nxpipe build`."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from pipeline.cli import Command
from pipeline.config import Config, Model, load_config
from pipeline.config.models import Autocast, AutocastType, Task
from pipeline.options import config_option, store_option
from pipeline.output import Console, human_bytes
from pipeline.parameters import Numbers, Phases, Target
from pipeline.store_url import store_url
from pipeline.suggest import did_you_mean
from pipeline.verify import sentences

if TYPE_CHECKING:
    from pipeline.build import Built
    from pipeline.order import Order


def _field(name: str) -> str:
    """What the configuration says of the same thing."""
    return str(Model.model_fields[name].description)


@click.command(cls=Command)
@click.option(
    "--model-id", metavar="ID|FOLDER", help="Build this model instead of those in nxpipe.toml: a hub id, or a folder."
)
@click.option(
    "--only", "names", multiple=True, metavar="NAME", help="Build only this model of nxpipe.toml; may be repeated."
)
@click.option("--task", type=click.Choice(get_args(Task)), help=f"{_field('task')}  [default: what config.json names]")
@click.option("--target", type=Target(), default="inf2.xlarge", show_default=True, help=_field("target"))
@click.option("--tp", type=click.IntRange(1, 64), default=1, show_default=True, help=_field("tp"))
@click.option("--batches", type=Numbers(1024), default="1", show_default=True, help=_field("batches"))
@click.option("--buckets", type=Numbers(131072), default="128", show_default=True, help=_field("buckets"))
@click.option("--phases", type=Phases(), help=f"{_field('phases')}  [default: by task]")
@click.option(
    "--autocast",
    type=click.Choice(get_args(Autocast)),
    default="matmult",
    show_default=True,
    help=_field("autocast"),
)
@click.option(
    "--autocast-type",
    type=click.Choice(get_args(AutocastType)),
    default="bf16",
    show_default=True,
    help=_field("autocast_type"),
)
@click.option(
    "--weights",
    metavar="random:SEED|hub|FOLDER",
    help=f"{_field('weights')}  [default: the folder's own, or the hub's]",
)
@click.option("--revision", metavar="REV", help=_field("revision"))
@click.option(
    "--force", is_flag=True, help="Build even when the store holds the artifact; its bytes must come out equal."
)
@click.option("--no-verify", is_flag=True, help="Publish without comparing the emulated output with PyTorch's.")
@store_option
@config_option
@click.pass_context
def build(
    ctx: click.Context,
    /,
    config_path: Path,
    store: str | None,
    model_id: str | None,
    names: tuple[str, ...],
    force: bool,
    no_verify: bool,
    **flags: Any,
) -> None:
    """Compile a model on the emulator, verify it, publish the artifact.

    Without --model-id, every model of nxpipe.toml is built, as described there. An artifact that the store
    holds already is not built again. Prints one line for each artifact, and how near each output is to PyTorch.

    \b
    Example:
      nxpipe build --model-id bert-base-uncased --weights random:0
      nxpipe build --model-id ./my-llama --target trn2.48xlarge --buckets 128,512
    """
    from artifact_store import open_store
    from pipeline.build import build as carry_out
    from pipeline.evidence import Thresholds
    from pipeline.order import Order

    console: Console = ctx.obj
    _refuse_words_without_effect(ctx, model_id, flags)
    described = load_config(config_path, os.environ, missing_ok=model_id is not None)
    orders = [Order.from_flags(model_id, flags)] if model_id else _from_config(described, names, config_path.parent)
    requests = [order.request() for order in orders]
    opened = open_store(store_url(store, config_path))
    thresholds = None if no_verify else Thresholds(described.verify.min_cosine, described.verify.max_relative_error)
    answers = []
    for request in requests:
        done = carry_out(request, opened, console.step, thresholds=thresholds, force=force)
        answers.append(_as_json(done))
        if not console.json:
            console.result(_as_text(done))
    if console.json:
        console.data(answers)


def _refuse_words_without_effect(ctx: click.Context, model_id: str | None, flags: dict[str, Any]) -> None:
    """nxpipe.toml says everything of its models; a flag that it would overrule in silence is a mistake."""
    typed = [name for name in flags if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT]
    if typed and model_id is None:
        option = "--" + typed[0].replace("_", "-")
        raise click.UsageError(f"{option} goes with --model-id; for the models of nxpipe.toml, the file says it", ctx)
    if model_id is not None and ctx.params["names"]:
        raise click.UsageError(
            "--only names models of nxpipe.toml, and --model-id builds another; pass one of them", ctx
        )


def _from_config(config: Config, names: Sequence[str], root: Path) -> Iterator["Order"]:
    """The models of nxpipe.toml, in its order."""
    from pipeline.order import Order

    known = [model.name for model in config.models]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known) or 'none'}"
            raise click.BadParameter(f"nxpipe.toml describes no model {name!r}{hint}", param_hint="--only")
    return (Order.from_config(model, root) for model in config.models if not names or model.name in names)


def _as_text(done: "Built") -> str:
    published, manifest = done.published, done.published.manifest
    programs = len(manifest.executables)
    headline = (
        "cached" if done.cached else "built",
        f"{published.model_id}@{published.request_key[:12]}",
        published.target,
        f"{programs} program{'s' if programs > 1 else ''}",
        human_bytes(published.size_bytes),
    )
    return "\n".join(["  ".join(headline), *(f"  {text}" for text in sentences(manifest.report))])


def _as_json(done: "Built") -> dict[str, object]:
    published = done.published
    return {
        "model": published.model_id,
        "request_key": published.request_key,
        "manifest": published.manifest_digest,
        "cache": "hit" if done.cached else "miss",
        "target": published.target,
        "programs": [program.name for program in published.manifest.executables],
        "size_bytes": published.size_bytes,
        "verification": published.manifest.report,
    }
