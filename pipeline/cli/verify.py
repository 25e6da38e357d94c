"""`nxpipe verify`: the deviation of the emulated model from its reference."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click

from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, execution_options, model_options
from nxpipe.pipeline.cli.options import (
    config_option,
    device_option,
    html_option,
    limit_option,
    require_device_for_limit,
    require_device_options,
    store_option,
    write_page,
)
from nxpipe.pipeline.cli.param_types import Choice, Count
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.models import Autocast
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.util.text import Column, for_terminal, table
from nxpipe.pipeline.verify.execution import ExecutionOptions, statistics_sentence

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.models.spec import ModelSpec
    from nxpipe.pipeline.models.thresholds import Deviation, Thresholds
    from nxpipe.pipeline.verify.comparison import Case, Comparison, VariantResult, VerifyOptions

_FIGURES: Final = (
    Column("run"),
    Column("output"),
    Column("max abs", drop=1),
    Column("mean abs", drop=2),
    Column("max rel"),
    Column("cosine"),
    Column("KL", drop=3),
    Column("top-1", drop=3),
)


@dataclass(frozen=True)
class _Labelled:
    """A comparison with the labels of its rows."""

    model: str
    autocast_type: str | None  # None for an artifact
    comparison: "Comparison"
    machine: str = "emulated"  # or "device": what ran the programs

    def label(self, result: "VariantResult") -> str:
        if result.variant in ("matmult", "all"):
            return f"{self.machine}, {result.variant} {self.autocast_type}"
        return f"{self.machine}, {result.variant}" if result in self.comparison.emulated else result.variant


@click.command(cls=Command)
@click.argument("artifact", required=False, shell_complete=complete_artifacts)
@model_options("verify")
@click.option(
    "--also",
    multiple=True,
    type=Choice(get_args(Autocast)),
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
    type=Count(1),
    metavar="N",
    help="Verify only the first N layers, for a model too large for this machine.",
)
@click.option(
    "--steps",
    type=Count(1),
    default=None,
    metavar="K",
    help="Verify K decode steps after the prompt, each on the KV cache of the previous step.",
)
@click.option(
    "--attest",
    is_flag=True,
    help="Store the result of ARTIFACT with --mode isa as evidence of kind instructions, if it is within [verify].",
)
@html_option
@execution_options
@device_option
@limit_option
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
    attest: bool,
    html_path: Path | None,
    execution: ExecutionOptions,
    device: str | None,
    limit: float,
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

    --device runs the NEFFs of ARTIFACT on this machine's devices, compares them in the same way, and stores nothing.
    `nxpipe prove` compares with the artifact's evidence alone, measures, and stores a document of kind `device`. A
    device that is missing or fails is code 31.

    \b
    Example:
      nxpipe verify --model-id bert-base-uncased --weights random:0 --task fill-mask --also all
      nxpipe verify --model-id ./my-llama --layers --prompts prompts.txt --steps 16
      nxpipe verify --model-id gpt2 --weights random:0 --mode isa --steps 4
      nxpipe verify bert-base-uncased@4e9ce0 --store s3://my-artifacts/nxpipe
      nxpipe verify bert-base-uncased@4e9ce0 --mode isa --attest
      nxpipe verify bert-base-uncased@4e9ce0 --device
      nxpipe verify --model-id ./my-llama --layers --html accuracy.html
    """
    from nxpipe.pipeline.models.prompts import read_prompts
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.verify.comparison import VerifyOptions

    console: Console = ctx.obj
    options.require_applicable()
    if device is not None:
        require_device_options(ctx, artifact)
        if attest:
            raise click.UsageError("--device and --attest cannot be combined; `nxpipe prove` stores such evidence", ctx)
    require_device_for_limit(ctx, device)
    config = load_config(config_path, os.environ, missing_ok=bool(options.model_id or artifact))
    if attest and (artifact is None or execution.mode != "isa"):
        raise click.UsageError("--attest stores a run of an artifact's instructions; pass ARTIFACT and --mode isa", ctx)
    lines = read_prompts(prompts) if prompts else ()
    thresholds = Thresholds.of(config)
    verify_options = VerifyOptions(also, lines, layers, slice_layers, steps or 0, execution, truncate)
    if artifact is not None:
        if options.model_id or options.names or verify_options != VerifyOptions(execution=execution):
            raise click.UsageError(
                "ARTIFACT cannot be combined with options of a model; pass only --store, --mode, --device and --json",
                ctx,
            )
        if device is not None:
            compared = _on_devices(artifact, store, config_path, (device, limit), console)
            _show(compared, verify_options, thresholds, console, html_path)
            return
        replay = _Replay.of(artifact, store, config_path, execution, console)
        _show(replay.comparisons(console, attested=attest), verify_options, thresholds, console, html_path)
        if attest:
            replay.attest(thresholds, console)
    else:
        comparisons = _of_models(options.specs(config, config_path.parent), verify_options, console)
        _show(comparisons, verify_options, thresholds, console, html_path)


def _show(
    comparisons: Iterable[_Labelled],
    verify_options: "VerifyOptions",
    thresholds: "Thresholds",
    console: Console,
    html_path: Path | None,
) -> None:
    """Print each comparison; raise after the last one if any result is beyond the thresholds."""
    documents, failures = [], []
    for comparison in comparisons:
        documents.append(_as_json(comparison, verify_options, thresholds))
        failures += _failures(comparison, thresholds)
        if not console.json:
            console.page(_as_text(comparison, verify_options, thresholds))
    if console.json:
        console.data(documents)
    if html_path is not None:
        from nxpipe.pipeline.build.report.result_pages import verify_page

        write_page(html_path, verify_page(documents), console)
    if failures:
        raise VerificationFailed(
            f"verification failed: {'; '.join(failures)}; choose a more precise autocast or relax [verify] in "
            "nxpipe.toml"
        )


@dataclass(frozen=True)
class _Replay:
    """The programs of an artifact, run on their stored inputs."""

    published: "Published"
    store: "Store"
    execution: ExecutionOptions
    kept: "list[tuple[Case, Comparison]]" = field(default_factory=list)

    @classmethod
    def of(
        cls, name: str, store: str | None, config_path: Path, execution: ExecutionOptions, console: Console
    ) -> "_Replay":
        from nxpipe.pipeline.artifacts.store_url import open_configured_store

        opened = open_configured_store(store, config_path, console)
        return cls(opened.resolve(name), opened, execution)

    def comparisons(self, console: Console, *, attested: bool) -> Iterator[_Labelled]:
        from nxpipe.pipeline.verify.replay import compare_artifact

        kept = self.kept if attested else None
        for comparison in compare_artifact(self.published, self.store, console.step, self.execution, kept):
            yield _Labelled(self.published.name, None, comparison)

    def attest(self, thresholds: "Thresholds", console: Console) -> None:
        """Store the evidence of kind instructions."""
        from nxpipe.artifact_store.evidence import INSTRUCTIONS, Evidence, Limits
        from nxpipe.pipeline.verify.replay import compared_run

        limits, name = Limits.model_validate(asdict(thresholds)), self.published.name
        programs = tuple(compared_run(case, comparison, self.store) for case, comparison in self.kept)
        manifest = self.published.manifest_digest
        self.store.attest(Evidence(manifest=manifest, kind=INSTRUCTIONS, programs=programs, limits=limits))
        console.say(f"{name} has evidence of kind {INSTRUCTIONS}; sign it with: nxpipe store sign {name}")


def _on_devices(
    name: str, store: str | None, config_path: Path, machine: tuple[str, float], console: Console
) -> Iterator[_Labelled]:
    """The comparisons on the devices of a library, with a limit for silent ranks."""
    from nxpipe.pipeline.artifacts.store_url import open_uncached_store
    from nxpipe.pipeline.util.progress import watching
    from nxpipe.pipeline.verify.device import DeviceOptions
    from nxpipe.pipeline.verify.replay import compare_on_devices

    opened = open_uncached_store(store, config_path, console)
    published, watch = opened.resolve(name), partial(watching, console)
    device, limit = machine
    for comparison in compare_on_devices(published, opened, DeviceOptions(device, limit=limit), console.step, watch):
        yield _Labelled(published.name, None, comparison, "device")


def _of_models(specs: "Sequence[ModelSpec]", options: "VerifyOptions", console: Console) -> Iterator[_Labelled]:
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.cases import compare_model

    for spec in map(BuildSpec.of, specs):
        for comparison in compare_model(spec, options, console.step):
            yield _Labelled(spec.source.id, spec.autocast_type, comparison)


def _failures(labelled: _Labelled, thresholds: "Thresholds") -> list[str]:
    """The failures of all emulated variants; of the layers only the first divergent one, because later ones read it."""
    return [
        f"{labelled.model} {labelled.comparison.program} autocast {result.variant} {failure}"
        for result in labelled.comparison.emulated
        for failure in (*result.faults(thresholds), *result.layer_faults(thresholds))
    ]


def _as_text(labelled: _Labelled, verify_options: "VerifyOptions", thresholds: "Thresholds") -> str:
    comparison = labelled.comparison
    cut = f", first {verify_options.slice_layers} layers" if verify_options.slice_layers else ""
    headline = (
        f"{labelled.model}  {comparison.program}{cut}, against {comparison.reference}, on {comparison.input_source}"
    )
    results = (*comparison.emulated, *comparison.other_references)
    parts = [
        for_terminal(headline),
        _figures([(labelled.label(result), deviation) for result in results for deviation in _worst(result.outputs)]),
    ]
    parts += [f"  {labelled.label(result)}: {statistics_sentence(result.work)}" for result in results if result.work]
    if any(result.layers for result in results):
        parts += ["  Layer by layer, largest relative error:", _growth(labelled, results)]
        parts += [f"  {labelled.label(result)}: {_verdict(result, thresholds)}" for result in results]
    return "\n".join(parts)


def _worst(outputs: Sequence["Deviation"]) -> Iterator["Deviation"]:
    """The deviations, with one row per kind of cache state: the worst of all layers. `--json` has every layer."""
    kinds: dict[str, list[Deviation]] = {}
    for deviation in outputs:
        kind = (
            re.sub(r"\.\d+\.", ".*.", deviation.output) if deviation.output.startswith("cache.") else deviation.output
        )
        kinds.setdefault(kind, []).append(deviation)
    for kind, deviations in kinds.items():
        # NaN is worse than any number, and every comparison with it is false.
        worst = max(
            deviations, key=lambda deviation: (deviation.max_relative != deviation.max_relative, deviation.max_relative)
        )
        yield worst if len(deviations) == 1 else replace(worst, output=f"{kind}, the worst of {len(deviations)}")


def _growth(labelled: _Labelled, results: Sequence["VariantResult"]) -> str:
    """One row per layer, one column per run."""
    columns = [{layer.output: f"{layer.max_relative:.3g}" for layer in result.layers} for result in results]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return table(("layer", *(labelled.label(result) for result in results)), rows, indent="    ")


def _verdict(result: "VariantResult", thresholds: "Thresholds") -> str:
    first = result.first_divergent(thresholds)
    return (
        f"{for_terminal(first)} is the first layer beyond the thresholds"
        if first
        else "no layer is beyond the thresholds"
    )


def _figures(rows: Sequence[tuple[str, "Deviation"]]) -> str:
    cells = []
    for label, deviation in rows:
        errors = (deviation.max_absolute, deviation.mean_absolute, deviation.max_relative)
        distances = ("" if figure is None else f"{figure:.4g}" for figure in (deviation.kl, deviation.top1))
        cells.append(
            [label, deviation.output, *(f"{error:.3g}" for error in errors), f"{deviation.cosine:.7f}", *distances]
        )
    return table(_FIGURES, cells, indent="    ")


def _as_json(labelled: _Labelled, verify_options: "VerifyOptions", thresholds: "Thresholds") -> dict[str, object]:
    comparison = labelled.comparison
    return {
        "model": labelled.model,
        "program": comparison.program,
        "autocast_type": labelled.autocast_type,
        "mode": "device" if labelled.machine == "device" else verify_options.execution.mode,
        "slice_layers": verify_options.slice_layers,
        "inputs": comparison.input_source,
        "thresholds": asdict(thresholds),
        "passed": not _failures(labelled, thresholds),
        "yardstick": comparison.reference,
        labelled.machine: {result.variant: _result_json(result, thresholds) for result in comparison.emulated},
        "beside": {result.variant: _result_json(result, thresholds) for result in comparison.other_references},
    }


def _result_json(result: "VariantResult", thresholds: "Thresholds") -> dict[str, object]:
    document: dict[str, object] = {"outputs": [asdict(deviation) for deviation in result.outputs]}
    if result.layers:
        document["layers"] = [asdict(deviation) for deviation in result.layers]
        document["first_layer_beyond"] = result.first_divergent(thresholds)
    if result.work:
        document["work"] = result.work.document()
    return document
