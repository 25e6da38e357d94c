"""`nxpipe verify`: the deviation of the emulated model from its reference."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, execution_options, model_options
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.models import Autocast
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.util.text import for_terminal, table
from nxpipe.pipeline.verify.execution import ExecutionOptions, statistics_sentence

if TYPE_CHECKING:
    from nxpipe.pipeline.models.spec import ModelSpec
    from nxpipe.pipeline.models.thresholds import Deviation, Thresholds
    from nxpipe.pipeline.verify.comparison import Comparison, VariantResult, VerifyOptions


@dataclass(frozen=True)
class _Shown:
    """A comparison with the labels of its output."""

    model: str
    autocast_type: str | None  # None for an artifact
    done: "Comparison"

    def way(self, run: "VariantResult") -> str:
        if run.variant in ("matmult", "all"):
            return f"emulated, {run.variant} {self.autocast_type}"
        return f"emulated, {run.variant}" if run in self.done.emulated else run.variant


@click.command(cls=Command)
@click.argument("artifact", required=False)
@model_options("verify")
@click.option(
    "--also",
    multiple=True,
    type=click.Choice(get_args(Autocast)),
    help="Also verify this autocast mode; repeatable.",
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file of prompts, one per line: text, or token ids as a JSON list.  [default: sample texts if the model "
    "has a tokenizer, else random token ids]",
)
@click.option("--truncate", is_flag=True, help="Truncate prompts to the largest bucket and report the truncation.")
@click.option("--layers", is_flag=True, help="Compare every layer and report the first one beyond [verify].")
@click.option(
    "--slice-layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Verify only the first N layers, for a model too large for this machine.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=None,
    metavar="K",
    help="Verify K decode steps after the prompt, each on the KV cache of the previous step.",
)
@execution_options
@store_option
@config_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    artifact: str | None,
    options: ModelOptions,
    also: tuple[Autocast, ...],
    prompts: Path | None,
    truncate: bool,
    layers: bool,
    slice_layers: int | None,
    steps: int | None,
    execution: ExecutionOptions,
    store: str | None,
    config_path: Path,
) -> None:
    """Compare the emulated model with PyTorch; with --layers, layer by layer.

    The reference is PyTorch in fp32 on the same weights and inputs; the deviation of PyTorch's own bf16 is shown beside
    it. --mode isa executes the compiled programs on emulated cores, instruction by instruction, and checks every
    semaphore wait; --json includes the instruction counts. ARTIFACT is an artifact of the store, as MODEL@KEY: all of
    its blobs are checked against their digests, and its programs run on their stored inputs. A .pt2 file is compared
    with PyTorch, an ONNX file with ONNX's reference evaluator. Exits with code 12 if an output is beyond the thresholds
    of [verify] in nxpipe.toml.

    \b
    Example:
      nxpipe verify --model-id bert-base-uncased --weights random:0 --task fill-mask --also all
      nxpipe verify --model-id ./my-llama --layers --prompts prompts.txt --steps 16
      nxpipe verify --model-id gpt2 --weights random:0 --mode isa --steps 4
      nxpipe verify bert-base-uncased@4e9ce0 --store s3://my-artifacts/nxpipe
    """
    from nxpipe.pipeline.models.prompts import read_prompts
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.verify.comparison import VerifyOptions

    console: Console = ctx.obj
    options.require_applicable()
    config = load_config(config_path, os.environ, missing_ok=bool(options.model_id or artifact))
    lines = read_prompts(prompts) if prompts else ()
    verify_options = VerifyOptions(also, lines, layers, slice_layers, steps or 0, execution, truncate)
    if artifact is not None:
        if options.model_id or options.names or verify_options != VerifyOptions(execution=execution):
            raise click.UsageError("ARTIFACT is verified as published; pass only --store, --mode and --json", ctx)
        found = _of_artifact(artifact, store, config_path, execution, console)
    else:
        found = _of_models(options.specs(config, config_path.parent), verify_options, console)
    _show(found, verify_options, Thresholds.of(config), console)


def _show(found: Iterable[_Shown], verify_options: "VerifyOptions", allowed: "Thresholds", console: Console) -> None:
    """Print each comparison when it is done; raise after the last one if any is beyond the thresholds."""
    documents, faults = [], []
    for shown in found:
        documents.append(_as_json(shown, verify_options, allowed))
        faults += _faults(shown, allowed)
        if not console.json:
            console.page(_as_text(shown, verify_options, allowed))
    if console.json:
        console.data(documents)
    if faults:
        raise VerificationFailed(
            f"verification failed: {'; '.join(faults)}; choose a more precise autocast or relax [verify] in nxpipe.toml"
        )


def _of_artifact(
    name: str, store: str | None, config_path: Path, execution: ExecutionOptions, console: Console
) -> Iterator[_Shown]:
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.verify.replay import compare_artifact

    opened = open_configured_store(store, config_path, console)
    published = opened.resolve(name)
    title = published.name
    yield from (_Shown(title, None, done) for done in compare_artifact(published, opened, console.step, execution))


def _of_models(specs: "Sequence[ModelSpec]", options: "VerifyOptions", console: Console) -> Iterator[_Shown]:
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.cases import compare_model

    for spec in map(BuildSpec.of, specs):
        for done in compare_model(spec, options, console.step):
            yield _Shown(spec.source.id, spec.autocast_type, done)


def _faults(shown: _Shown, allowed: "Thresholds") -> list[str]:
    """Only the first divergent layer: later layers compute with its output."""
    return [
        f"{shown.model} {shown.done.program} autocast {run.variant} {fault}"
        for run in shown.done.emulated
        for fault in (*run.faults(allowed), *run.layer_faults(allowed))
    ]


def _as_text(shown: _Shown, verify_options: "VerifyOptions", allowed: "Thresholds") -> str:
    done = shown.done
    cut = f", first {verify_options.slice_layers} layers" if verify_options.slice_layers else ""
    headline = f"{shown.model}  {done.program}{cut}, against {done.reference}, on {done.input_source}"
    runs = (*done.emulated, *done.other_references)
    parts = [
        for_terminal(headline),
        _indented(_figures([(shown.way(run), found) for run in runs for found in _worst(run.outputs)])),
    ]
    parts += [f"  {shown.way(run)}: {statistics_sentence(run.work)}" for run in runs if run.work]
    if any(run.layers for run in runs):
        parts += ["  Layer by layer, largest relative error:", _indented(_growth(shown, runs))]
        parts += [f"  {shown.way(run)}: {_verdict(run, allowed)}" for run in runs]
    return "\n".join(parts)


def _worst(outputs: Sequence["Deviation"]) -> Iterator["Deviation"]:
    """One row per kind of cache state, the worst of all layers; `--json` has every one."""
    kinds: dict[str, list[Deviation]] = {}
    for found in outputs:
        kind = re.sub(r"\.\d+\.", ".*.", found.output) if found.output.startswith("cache.") else found.output
        kinds.setdefault(kind, []).append(found)
    for kind, alike in kinds.items():
        # NaN is worse than any number, and compares with none.
        worst = max(alike, key=lambda found: (found.max_relative != found.max_relative, found.max_relative))
        yield worst if len(alike) == 1 else replace(worst, output=f"{kind}, the worst of {len(alike)}")


def _growth(shown: _Shown, runs: Sequence["VariantResult"]) -> str:
    """One row per layer, one column per run."""
    found = [{layer.output: f"{layer.max_relative:.3g}" for layer in run.layers} for run in runs]
    names = dict.fromkeys(name for column in found for name in column)
    rows = [[name, *(column.get(name, "") for column in found)] for name in names]
    return table(("layer", *(shown.way(run) for run in runs)), rows)


def _verdict(run: "VariantResult", allowed: "Thresholds") -> str:
    first = run.first_divergent(allowed)
    return (
        f"{for_terminal(first)} is the first layer beyond the thresholds"
        if first
        else "no layer is beyond the thresholds"
    )


def _figures(rows: Sequence[tuple[str, "Deviation"]]) -> str:
    cells = []
    for way, found in rows:
        errors = (found.max_absolute, found.mean_absolute, found.max_relative)
        distances = ("" if figure is None else f"{figure:.4g}" for figure in (found.kl, found.top1))
        cells.append([way, found.output, *(f"{error:.3g}" for error in errors), f"{found.cosine:.7f}", *distances])
    return table(("", "output", "max abs", "mean abs", "max rel", "cosine", "KL", "top-1"), cells)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _as_json(shown: _Shown, verify_options: "VerifyOptions", allowed: "Thresholds") -> dict[str, object]:
    done = shown.done
    return {
        "model": shown.model,
        "program": done.program,
        "autocast_type": shown.autocast_type,
        "mode": verify_options.execution.mode,
        "slice_layers": verify_options.slice_layers,
        "inputs": done.input_source,
        "thresholds": asdict(allowed),
        "passed": not _faults(shown, allowed),
        "yardstick": done.reference,
        "emulated": {run.variant: _run_json(run, allowed) for run in done.emulated},
        "beside": {run.variant: _run_json(run, allowed) for run in done.other_references},
    }


def _run_json(run: "VariantResult", allowed: "Thresholds") -> dict[str, object]:
    document: dict[str, object] = {"outputs": [asdict(found) for found in run.outputs]}
    if run.layers:
        document["layers"] = [asdict(found) for found in run.layers]
        document["first_layer_beyond"] = run.first_divergent(allowed)
    if run.work:
        document["work"] = run.work.document()
    return document
