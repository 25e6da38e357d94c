"""`nxpipe verify`."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from pipeline.cli import Command
from pipeline.config import load_config
from pipeline.config.models import Autocast
from pipeline.errors import VerificationFailed
from pipeline.options import config_option
from pipeline.order_options import order_options, orders, refuse_words_without_effect
from pipeline.output import Console, table

if TYPE_CHECKING:
    from pipeline.comparison import Comparison, Run, Trial
    from pipeline.request import BuildRequest
    from pipeline.verify import Deviation, Thresholds


@click.command(cls=Command)
@order_options("verify")
@click.option(
    "--also",
    multiple=True,
    type=click.Choice(get_args(Autocast)),
    help="Verify this autocast mode too; may be repeated.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Read these prompts, one a line: text, or token ids as a JSON list.  [default: random token ids]",
)
@click.option("--layers", is_flag=True, help="Compare every layer, and name the first that is beyond [verify].")
@click.option(
    "--slice-layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Verify the first N layers only, of a model that is too large for this machine.",
)
@config_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    config_path: Path,
    model_id: str | None,
    names: tuple[str, ...],
    also: tuple[str, ...],
    prompts: Path | None,
    layers: bool,
    slice_layers: int | None,
    **flags: Any,
) -> None:
    """Compare the emulated model with PyTorch, layer by layer if asked.

    The yardstick is PyTorch in fp32, on the same weights and inputs; what PyTorch's own bf16 gives stands beside.
    Ends in exit code 12 when an answer is beyond the thresholds of [verify] in nxpipe.toml.

    \b
    Example:
      nxpipe verify --model-id bert-base-uncased --weights random:0 --task fill-mask --also all
      nxpipe verify --model-id ./my-llama --layers --prompts prompts.txt
    """
    from pipeline.comparison import Trial, compare_model
    from pipeline.models.prompts import read_prompts
    from pipeline.verify import Thresholds

    console: Console = ctx.obj
    refuse_words_without_effect(ctx, model_id, flags)
    described = load_config(config_path, os.environ, missing_ok=model_id is not None)
    allowed = Thresholds.of(described)
    trial = Trial(also, read_prompts(prompts) if prompts else (), layers, slice_layers)
    documents, faults = [], []
    for order in orders(model_id, flags, described, names, config_path.parent):
        request = order.request()
        for done in compare_model(request, trial, console.step):
            documents.append(_as_json(request, trial, done, allowed))
            faults += [
                f"{request.source.id} {done.program}, autocast {run.way}, {fault}"
                for run in done.emulated
                for fault in run.faults(allowed)
            ]
            if not console.json:
                console.result(_as_text(request, trial, done, allowed))
    if console.json:
        console.data(documents)
    if faults:
        raise VerificationFailed(
            f"beyond [verify]: {'; '.join(faults)}; choose a gentler autocast, or change the thresholds"
        )


def _as_text(request: "BuildRequest", trial: "Trial", done: "Comparison", allowed: "Thresholds") -> str:
    cut = f", only its first {trial.slice_layers} layers" if trial.slice_layers else ""
    headline = f"{request.source.id}  {done.program}{cut}, against PyTorch fp32"
    runs = (*done.emulated, done.pytorch)
    parts = [headline, _indented(_figures([(_way(request, run), found) for run in runs for found in run.outputs]))]
    if trial.layers:
        parts += ["  Layer by layer, largest relative error:", _indented(_growth(request, runs))]
        parts += [f"  {_way(request, run)}: {_verdict(run, allowed)}" for run in runs]
    return "\n".join(parts)


def _growth(request: "BuildRequest", runs: Sequence["Run"]) -> str:
    """A row a layer, a column a way."""
    found = [{layer.output: f"{layer.max_relative:.3g}" for layer in run.layers} for run in runs]
    names = dict.fromkeys(name for column in found for name in column)
    rows = [[name, *(column.get(name, "") for column in found)] for name in names]
    return table(("layer", *(_way(request, run) for run in runs)), rows)


def _verdict(run: "Run", allowed: "Thresholds") -> str:
    first = run.first_divergent(allowed)
    return f"{first} is the first layer beyond [verify]" if first else "no layer is beyond [verify]"


def _way(request: "BuildRequest", run: "Run") -> str:
    if run.way in ("matmult", "all"):
        return f"emulated, {run.way} {request.autocast_type}"
    return f"emulated, {run.way}" if run.way == "none" else run.way


def _figures(rows: Sequence[tuple[str, "Deviation"]]) -> str:
    cells = []
    for way, found in rows:
        errors = (found.max_absolute, found.mean_absolute, found.max_relative)
        distances = ("" if figure is None else f"{figure:.4g}" for figure in (found.kl, found.top1))
        cells.append([way, found.output, *(f"{error:.3g}" for error in errors), f"{found.cosine:.7f}", *distances])
    return table(("", "output", "max abs", "mean abs", "max rel", "cosine", "KL", "top-1"), cells)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _as_json(request: "BuildRequest", trial: "Trial", done: "Comparison", allowed: "Thresholds") -> dict[str, object]:
    return {
        "model": request.source.id,
        "program": done.program,
        "autocast_type": request.autocast_type,
        "slice_layers": trial.slice_layers,
        "inputs": "prompts" if trial.prompts else "random",
        "thresholds": asdict(allowed),
        "passed": not any(run.faults(allowed) for run in done.emulated),
        "emulated": {run.way: _run_json(run, allowed) for run in done.emulated},
        "pytorch_bf16": _run_json(done.pytorch, allowed),
    }


def _run_json(run: "Run", allowed: "Thresholds") -> dict[str, object]:
    document: dict[str, object] = {"outputs": [asdict(found) for found in run.outputs]}
    if run.layers:
        document["layers"] = [asdict(found) for found in run.layers]
        document["first_layer_beyond"] = run.first_divergent(allowed)
    return document
