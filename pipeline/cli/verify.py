"""`nxpipe verify`."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import (
    axis_option,
    check_model_options,
    execution_of,
    execution_options,
    model_options,
    model_specs,
)
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.models import Autocast
from nxpipe.pipeline.util.console import Console, table
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.pipeline.verify.execution import ExecutionOptions, statistics_sentence

if TYPE_CHECKING:
    from nxpipe.pipeline.models.spec import ModelSpec
    from nxpipe.pipeline.models.thresholds import Deviation, Thresholds
    from nxpipe.pipeline.verify.comparison import Comparison, VariantResult, VerifyOptions


@dataclass(frozen=True)
class _ModelComparison:
    """A comparison of one program, with its model."""

    model: str
    autocast_type: str | None  # None: of an artifact, which was compiled before
    comparison: "Comparison"

    def variant_name(self, run: "VariantResult") -> str:
        if run.variant in ("matmult", "all"):
            return f"emulated, {run.variant} {self.autocast_type}"
        return f"emulated, {run.variant}" if run in self.comparison.emulated else run.variant


@click.command(cls=Command)
@click.argument("artifact", required=False)
@model_options("verify")
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
    help="Read these prompts, one a line: text, or token ids as a JSON list.  "
    "[default: sample texts if the model has a tokenizer, else random token ids]",
)
@click.option(
    "--truncate", is_flag=True, help="Cut prompts that are longer than the largest bucket, and report by how much."
)
@click.option(
    "--layers", is_flag=True, help="Compare every layer, and report the first beyond the thresholds of [verify]."
)
@click.option(
    "--slice-layers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Verify the first N layers only, of a model that is too large for this machine.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=None,
    metavar="K",
    help="Compare K decode steps after the prompt, each from the KV cache of the last.",
)
@execution_options
@axis_option
@store_option
@config_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    config_path: Path,
    store: str | None,
    artifact: str | None,
    model_id: str | None,
    names: tuple[str, ...],
    **options: Any,
) -> None:
    """Compare the emulated model with PyTorch, optionally layer by layer.

    The reference is PyTorch in fp32, on the same weights and inputs; PyTorch's own bf16 is shown beside it. With
    --mode isa, programs run on emulated cores, instruction by instruction, with all semaphore waits checked; --json
    has the instruction counts. ARTIFACT is one of the store, as MODEL@KEY: all of its blobs are checked against their
    digests, and its programs run again on their stored inputs. The reference of a .pt2 file is PyTorch, that of an
    ONNX file ONNX's reference evaluator. The exit code is 12 when an output is beyond the thresholds of [verify] in
    nxpipe.toml.

    \b
    Example:
      nxpipe verify --model-id bert-base-uncased --weights random:0 --task fill-mask --also all
      nxpipe verify --model-id ./my-llama --layers --prompts prompts.txt --steps 16
      nxpipe verify --model-id gpt2 --weights random:0 --mode isa --steps 4
      nxpipe verify bert-base-uncased@4e9ce0 --store s3://my-artifacts/nxpipe
    """
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.verify.comparison import VerifyOptions

    console: Console = ctx.obj
    check_model_options(ctx, model_id, options)
    config = load_config(config_path, os.environ, missing_ok=bool(model_id or artifact))
    verify_options = _verify_options(options)
    if artifact is not None:
        if model_id or names or verify_options != VerifyOptions(execution=verify_options.execution):
            raise click.UsageError("an artifact is verified as it was published: name it alone, with --store", ctx)
        found = _compare_artifact(artifact, store, config_path, verify_options.execution, console)
    else:
        specs = model_specs(model_id, options, config, names, config_path.parent)
        found = _compare_models(specs, verify_options, console)
    _report(found, verify_options, Thresholds.of(config), console)


def _verify_options(options: Mapping[str, Any]) -> "VerifyOptions":
    from nxpipe.pipeline.models.prompts import read_prompts
    from nxpipe.pipeline.verify.comparison import VerifyOptions

    execution = execution_of(options["mode"], options["engine_order"])
    prompts = read_prompts(options["prompts"]) if options["prompts"] else ()
    extent = (options["layers"], options["slice_layers"], options["steps"] or 0)
    return VerifyOptions(options["also"], prompts, *extent, execution, options["truncate"])


def _report(
    found: Iterable[_ModelComparison], options: "VerifyOptions", allowed: "Thresholds", console: Console
) -> None:
    """Print each comparison when it is done; VerificationFailed at the end, if any is beyond the thresholds."""
    documents, faults = [], []
    for result in found:
        documents.append(_as_json(result, options, allowed))
        faults += _faults(result, allowed)
        if not console.json:
            console.page(_as_text(result, options, allowed))
    if console.json:
        console.data(documents)
    if faults:
        raise VerificationFailed(
            f"verification failed: {'; '.join(faults)}; choose a gentler autocast, or change the thresholds"
        )


def _compare_artifact(
    name: str, store: str | None, config_path: Path, execution: ExecutionOptions, console: Console
) -> Iterator[_ModelComparison]:
    from nxpipe.pipeline.cli.store_url import open_the_store
    from nxpipe.pipeline.verify.replay import compare_artifact

    opened = open_the_store(store, config_path, console)
    published = opened.resolve(name)
    title = published.name
    yield from (
        _ModelComparison(title, None, done) for done in compare_artifact(published, opened, console.step, execution)
    )


def _compare_models(
    specs: "Sequence[ModelSpec]", options: "VerifyOptions", console: Console
) -> Iterator[_ModelComparison]:
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.cases import compare_model

    for spec in map(BuildSpec.of, specs):
        for comparison in compare_model(spec, options, console.step):
            yield _ModelComparison(spec.source.id, spec.autocast_type, comparison)


def _faults(result: _ModelComparison, allowed: "Thresholds") -> list[str]:
    """The faults of all outputs, and of the first layer beyond the thresholds."""
    return [
        f"{result.model} {result.comparison.program} autocast {run.variant} {fault}"
        for run in result.comparison.emulated
        for fault in (*run.faults(allowed), *run.layer_faults(allowed))
    ]


def _as_text(result: _ModelComparison, options: "VerifyOptions", allowed: "Thresholds") -> str:
    done = result.comparison
    cut = f", only its first {options.slice_layers} layers" if options.slice_layers else ""
    headline = f"{result.model}  {done.program}{cut}, against {done.reference}, on {done.input_source}"
    runs = (*done.emulated, *done.beside)
    parts = [
        for_terminal(headline),
        _indented(_figures([(result.variant_name(run), found) for run in runs for found in _worst(run.outputs)])),
    ]
    parts += [f"  {result.variant_name(run)}: {statistics_sentence(run.work)}" for run in runs if run.work]
    if any(run.layers for run in runs):
        parts += ["  Layer by layer, largest relative error:", _indented(_growth(result, runs))]
        parts += [f"  {result.variant_name(run)}: {_verdict(run, allowed)}" for run in runs]
    return "\n".join(parts)


def _worst(outputs: Sequence["Deviation"]) -> Iterator["Deviation"]:
    """Of the states that every layer has, the worst of a kind speaks for all; `--json` has each of them."""
    kinds: dict[str, list[Deviation]] = {}
    for found in outputs:
        kind = re.sub(r"\.\d+\.", ".*.", found.output) if found.output.startswith("cache.") else found.output
        kinds.setdefault(kind, []).append(found)
    for kind, alike in kinds.items():
        # NaN compares with nothing, and is worse than anything.
        worst = max(alike, key=lambda found: (found.max_relative != found.max_relative, found.max_relative))
        yield worst if len(alike) == 1 else replace(worst, output=f"{kind}, the worst of {len(alike)}")


def _growth(result: _ModelComparison, runs: Sequence["VariantResult"]) -> str:
    """A row a layer, a column a way."""
    found = [{layer.output: f"{layer.max_relative:.3g}" for layer in run.layers} for run in runs]
    names = dict.fromkeys(name for column in found for name in column)
    rows = [[name, *(column.get(name, "") for column in found)] for name in names]
    return table(("layer", *(result.variant_name(run) for run in runs)), rows)


def _verdict(run: "VariantResult", allowed: "Thresholds") -> str:
    first = run.first_divergent(allowed)
    return f"{for_terminal(first)} is the first layer beyond [verify]" if first else "no layer is beyond [verify]"


def _figures(rows: Sequence[tuple[str, "Deviation"]]) -> str:
    cells = []
    for way, found in rows:
        errors = (found.max_absolute, found.mean_absolute, found.max_relative)
        distances = ("" if figure is None else f"{figure:.4g}" for figure in (found.kl, found.top1))
        cells.append([way, found.output, *(f"{error:.3g}" for error in errors), f"{found.cosine:.7f}", *distances])
    return table(("", "output", "max abs", "mean abs", "max rel", "cosine", "KL", "top-1"), cells)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _as_json(result: _ModelComparison, options: "VerifyOptions", allowed: "Thresholds") -> dict[str, object]:
    done = result.comparison
    return {
        "model": result.model,
        "program": done.program,
        "autocast_type": result.autocast_type,
        "mode": options.execution.mode,
        "slice_layers": options.slice_layers,
        "inputs": done.input_source,
        "thresholds": asdict(allowed),
        "passed": not _faults(result, allowed),
        "yardstick": done.reference,
        "emulated": {run.variant: _run_json(run, allowed) for run in done.emulated},
        "beside": {run.variant: _run_json(run, allowed) for run in done.beside},
    }


def _run_json(run: "VariantResult", allowed: "Thresholds") -> dict[str, object]:
    document: dict[str, object] = {"outputs": [asdict(found) for found in run.outputs]}
    if run.layers:
        document["layers"] = [asdict(found) for found in run.layers]
        document["first_layer_beyond"] = run.first_divergent(allowed)
    if run.work:
        document["work"] = run.work.document()
    return document
