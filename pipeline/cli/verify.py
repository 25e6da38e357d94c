"""`nxpipe verify`."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import order_options, orders, refuse_words_without_effect
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.models import Autocast
from nxpipe.pipeline.order import words
from nxpipe.pipeline.saved import axis_option, saved_program
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.pipeline.util.text import table
from nxpipe.pipeline.verify.runner import Execution, execution_options, sentence

if TYPE_CHECKING:
    from nxpipe.pipeline.order import Order
    from nxpipe.pipeline.saved import SavedProgram
    from nxpipe.pipeline.verify.comparison import Comparison, Run, Trial
    from nxpipe.pipeline.verify.verify import Deviation, Thresholds


@dataclass(frozen=True)
class _Said:
    """A comparison, and what is said about it: whose it is, and the words that it was asked for with."""

    model: str
    autocast_type: str | None  # of an artifact, whose programs were compiled before, none
    done: "Comparison"

    def way(self, run: "Run") -> str:
        if run.way in ("matmult", "all"):
            return f"emulated, {run.way} {self.autocast_type}"
        return f"emulated, {run.way}" if run in self.done.emulated else run.way


@click.command(cls=Command)
@click.argument("artifact", required=False)
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
    help="Read these prompts, one a line: text, or token ids as a JSON list.  "
    "[default: sample texts if the model has a tokenizer, else random token ids]",
)
@click.option(
    "--truncate", is_flag=True, help="Cut prompts that are longer than the largest bucket, and say by how much."
)
@click.option("--layers", is_flag=True, help="Compare every layer, and name the first that is beyond [verify].")
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
    help="Follow a decoder over K tokens after its prompt, each beside the cache that the last one left.",
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
    **said: Any,
) -> None:
    """Compare the emulated model with PyTorch, layer by layer if asked.

    The yardstick is PyTorch in fp32, on the same weights and inputs; what PyTorch's own bf16 gives stands beside.
    With --mode isa, the compiler's programs are carried out on emulated cores, instruction by instruction, all waits
    checked; --json has what that took. ARTIFACT names one of the store, as MODEL@KEY: all of its blobs are read
    against their digests, and its programs run again on the inputs that are stored with them. A .pt2 file is held
    against PyTorch, an ONNX file against ONNX's reference evaluator. Ends in exit code 12 when an answer is beyond
    [verify] of nxpipe.toml.

    \b
    Example:
      nxpipe verify --model-id bert-base-uncased --weights random:0 --task fill-mask --also all
      nxpipe verify --model-id ./my-llama --layers --prompts prompts.txt --steps 16
      nxpipe verify --model-id gpt2 --weights random:0 --mode isa --steps 4
      nxpipe verify bert-base-uncased@4e9ce0 --store s3://my-artifacts/nxpipe
    """
    from nxpipe.pipeline.verify.comparison import Trial
    from nxpipe.pipeline.verify.verify import Thresholds

    console: Console = ctx.obj
    flags = {name: value for name, value in said.items() if name in words()}
    refuse_words_without_effect(ctx, model_id, flags)
    described = load_config(config_path, os.environ, missing_ok=bool(model_id or artifact))
    trial = _trial(said)
    if artifact is not None:
        if model_id or names or trial != Trial(execution=trial.execution):
            raise click.UsageError("an artifact is verified as it was published: name it alone, with --store", ctx)
        found = _of_artifact(artifact, store, config_path, trial.execution, console)
    elif (file := saved_program(ctx, model_id, flags, said["axes"])) is not None:
        found = _of_file(file, flags, trial, console)
    else:
        found = _of_models(orders(model_id, flags, described, names, config_path.parent), trial, console)
    _tell(found, trial, Thresholds.of(described), console)


def _trial(said: Mapping[str, Any]) -> "Trial":
    from nxpipe.pipeline.models.prompts import read_prompts
    from nxpipe.pipeline.verify.comparison import Trial

    execution = Execution.of(said["mode"], said["engine_order"])
    prompts = read_prompts(said["prompts"]) if said["prompts"] else ()
    shape = (said["layers"], said["slice_layers"], said["steps"] or 0)
    return Trial(said["also"], prompts, *shape, execution, said["truncate"])


def _tell(found: Iterable[_Said], trial: "Trial", allowed: "Thresholds", console: Console) -> None:
    """Each as soon as it is known; all of them, before what is beyond [verify] is an error."""
    documents, faults = [], []
    for said in found:
        documents.append(_as_json(said, trial, allowed))
        faults += _faults(said, allowed)
        if not console.json:
            console.page(_as_text(said, trial, allowed))
    if console.json:
        console.data(documents)
    if faults:
        raise VerificationFailed(
            f"beyond [verify]: {'; '.join(faults)}; choose a gentler autocast, or change the thresholds"
        )


def _of_artifact(
    name: str, store: str | None, config_path: Path, execution: Execution, console: Console
) -> Iterator[_Said]:
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.verify.replay import compare_artifact

    opened = open_configured_store(store, config_path, console)
    published = opened.resolve(name)
    title = published.name
    yield from (_Said(title, None, done) for done in compare_artifact(published, opened, console.step, execution))


def _of_file(file: "SavedProgram", flags: dict[str, Any], trial: "Trial", console: Console) -> Iterator[_Said]:
    from nxpipe.pipeline.order import Order
    from nxpipe.pipeline.saved_request import SavedRequest
    from nxpipe.pipeline.verify.cases import compare_file

    request = SavedRequest.of(file, Order.from_flags(str(file.path), flags))
    yield _Said(file.name, request.autocast_type, compare_file(request, trial, console.step))


def _of_models(asked: "Sequence[Order]", trial: "Trial", console: Console) -> Iterator[_Said]:
    from nxpipe.pipeline.verify.cases import compare_model

    for order in asked:
        request = order.request()
        for done in compare_model(request, trial, console.step):
            yield _Said(request.source.id, request.autocast_type, done)


def _faults(said: _Said, allowed: "Thresholds") -> list[str]:
    """Of layers the first alone: those after it compute with what it gave."""
    return [
        f"{said.model} {said.done.program}, autocast {run.way}, {fault}"
        for run in said.done.emulated
        for fault in (*run.faults(allowed), *run.layer_faults(allowed))
    ]


def _as_text(said: _Said, trial: "Trial", allowed: "Thresholds") -> str:
    done = said.done
    cut = f", only its first {trial.slice_layers} layers" if trial.slice_layers else ""
    headline = f"{said.model}  {done.program}{cut}, against {done.yardstick}, on {done.fed}"
    runs = (*done.emulated, *done.beside)
    parts = [
        for_terminal(headline),
        _indented(_figures([(said.way(run), found) for run in runs for found in _worst(run.outputs)])),
    ]
    parts += [f"  {said.way(run)}: {sentence(run.work)}" for run in runs if run.work]
    if any(run.layers for run in runs):
        parts += ["  Layer by layer, largest relative error:", _indented(_growth(said, runs))]
        parts += [f"  {said.way(run)}: {_verdict(run, allowed)}" for run in runs]
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


def _growth(said: _Said, runs: Sequence["Run"]) -> str:
    """A row a layer, a column a way."""
    found = [{layer.output: f"{layer.max_relative:.3g}" for layer in run.layers} for run in runs]
    names = dict.fromkeys(name for column in found for name in column)
    rows = [[name, *(column.get(name, "") for column in found)] for name in names]
    return table(("layer", *(said.way(run) for run in runs)), rows)


def _verdict(run: "Run", allowed: "Thresholds") -> str:
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


def _as_json(said: _Said, trial: "Trial", allowed: "Thresholds") -> dict[str, object]:
    done = said.done
    return {
        "model": said.model,
        "program": done.program,
        "autocast_type": said.autocast_type,
        "mode": trial.execution.mode,
        "slice_layers": trial.slice_layers,
        "inputs": done.fed,
        "thresholds": asdict(allowed),
        "passed": not _faults(said, allowed),
        "yardstick": done.yardstick,
        "emulated": {run.way: _run_json(run, allowed) for run in done.emulated},
        "beside": {run.way: _run_json(run, allowed) for run in done.beside},
    }


def _run_json(run: "Run", allowed: "Thresholds") -> dict[str, object]:
    document: dict[str, object] = {"outputs": [asdict(found) for found in run.outputs]}
    if run.layers:
        document["layers"] = [asdict(found) for found in run.layers]
        document["first_layer_beyond"] = run.first_divergent(allowed)
    if run.work:
        document["work"] = run.work.document()
    return document
