"""`nxpipe build`."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from pipeline import utilisation
from pipeline.cli import Command
from pipeline.commands.store.itself import open_the_store_itself
from pipeline.config import load_config
from pipeline.config.sections import Backend, Build
from pipeline.options import config_option, store_option
from pipeline.order_options import order_options, orders, refuse_words_without_effect
from pipeline.output import Console, human_bytes
from pipeline.progress import watching
from pipeline.saved import axis_option, saved_program
from pipeline.verify import sentences

if TYPE_CHECKING:
    from pipeline.build import Built


@click.command(cls=Command)
@order_options("build")
@click.option(
    "--force",
    is_flag=True,
    help="Build even when the store holds the artifact, whose bytes must come out equal, or remembers a failure.",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(Backend)),
    help=f"{Build.model_fields['backend'].description}  [default: what nxpipe.toml says, else emulator]",
)
@click.option("--no-verify", is_flag=True, help="Publish without comparing the emulated output with PyTorch's.")
@axis_option
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
    axes: tuple[tuple[str, int], ...],
    force: bool,
    backend: Backend | None,
    no_verify: bool,
    **flags: Any,
) -> None:
    """Compile a model on the emulator, verify it, publish the artifact.

    Without --model-id, every model of nxpipe.toml is built, as described there. An artifact that the store
    holds already is not built again, nor one that failed for a reason of its own. Prints one line for each artifact,
    how near each output is to PyTorch, and how each program uses the cores. A .pt2 or .onnx file is built from its own
    graph and weights.

    \b
    Example:
      nxpipe build --model-id bert-base-uncased --weights random:0
      nxpipe build --model-id ./my-llama --target trn2.48xlarge --buckets 128,512
      nxpipe build --model-id ./encoder.onnx --axis batch=1
    """
    from pipeline.build import build as carry_out
    from pipeline.saved_request import SavedRequest
    from pipeline.verify import Thresholds

    console: Console = ctx.obj
    refuse_words_without_effect(ctx, model_id, flags)
    described = load_config(config_path, os.environ, missing_ok=model_id is not None)
    file = saved_program(ctx, model_id, flags, axes)
    asked = orders(model_id, flags, described, names, config_path.parent)
    requests = [
        replace(order.request() if file is None else SavedRequest.of(file, order), verified=not no_verify)
        for order in asked
    ]
    if (backend or described.build.backend) == "neuronx":
        from pipeline.backends.neuronx.request import NeuronxRequest

        requests = [NeuronxRequest.of(request) for request in requests]
        console.say("  A NEFF runs on a Neuron device only, so nothing is verified here.")
    opened = open_the_store_itself(store, config_path, console)
    thresholds = Thresholds.of(described)
    answers = []
    for request in requests:
        done = carry_out(
            request,
            opened,
            console.step,
            console.say,
            thresholds=thresholds,
            force=force,
            watch=partial(watching, console),
        )
        programs = utilisation.read(done.published.manifest, opened)
        answers.append(_as_json(done, programs))
        if not console.json:
            console.result(_as_text(done, programs))
    if console.json:
        console.data(answers)


def _as_text(done: "Built", programs: dict[str, Any]) -> str:
    published, manifest = done.published, done.published.manifest
    count = len(manifest.executables)
    headline = (
        "cached" if done.cached else "built",
        f"{published.model_id}@{published.request_key[:12]}",
        published.target,
        f"{count} program{'s' if count > 1 else ''}",
        human_bytes(published.size_bytes),
    )
    parts = [*sentences(manifest.report), *(f"{name}: {line}" for name, line in utilisation.sentences(programs))]
    return "\n".join(["  ".join(headline), *(f"  {text}" for text in parts)])


def _as_json(done: "Built", programs: dict[str, Any]) -> dict[str, object]:
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
        "utilisation": programs,
    }
