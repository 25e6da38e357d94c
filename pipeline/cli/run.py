"""`nxpipe run`: the outputs of a model's programs on the emulator."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, execution_options, model_options
from nxpipe.pipeline.cli.options import (
    config_option,
    device_option,
    limit_option,
    require_device_for_limit,
    require_device_options,
    store_option,
)
from nxpipe.pipeline.cli.param_types import Count
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import WouldOverwrite
from nxpipe.pipeline.util.files import DocumentInvalid, MiB, read_file
from nxpipe.pipeline.util.text import for_terminal, table
from nxpipe.pipeline.verify.execution import ExecutionOptions, statistics_sentence

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.pipeline.models.weights import Arrays
    from nxpipe.pipeline.serving.model import ServingModel
    from nxpipe.pipeline.verify.replay import RunInputs, RunResult

_LIKELIEST = 5
_LARGEST_INPUT = 4096 * MiB


@click.command(cls=Command)
@click.argument("artifact", required=False, shell_complete=complete_artifacts)
@model_options("run")
@click.option(
    "--input",
    "input_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A .safetensors file with the program's inputs by name; missing cache states start at zero.",
)
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Text for the model's tokenizer, or token ids as a JSON list; repeatable.",
)
@click.option("--chat", metavar="TEXT", help="Answer this message by the model's chat template.")
@click.option(
    "--generate",
    "new_tokens",
    type=Count(1),
    metavar="N",
    help="With --text or --chat: generate at most N tokens.  [default: 64]",
)
@click.option("--truncate", is_flag=True, help="Truncate texts to the largest bucket and report the truncation.")
@click.option("--program", metavar="PROGRAM", help="Run only this program, as in forward-b1-s128.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Write the outputs of each program to FOLDER/PROGRAM.safetensors.",
)
@execution_options
@device_option
@limit_option
@store_option
@config_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    artifact: str | None,
    options: ModelOptions,
    input_file: Path | None,
    texts: tuple[str, ...],
    chat: str | None,
    new_tokens: int | None,
    truncate: bool,
    program: str | None,
    output: Path | None,
    execution: ExecutionOptions,
    device: str | None,
    limit: float,
    store: str | None,
    config_path: Path,
) -> None:
    """Run a model's programs on the emulator, or an artifact's on Neuron devices, and show their outputs.

    --text runs the program of the smallest bucket and batch that hold the texts, and --program the named one. A model
    with a decode program answers --text and --chat in text, the likeliest token each time, as `nxpipe generate` does;
    with --output or --program, or without a decode program, --text gives the outputs of the program.

    Without --input or --text, an artifact runs on its stored inputs and a model on random inputs from a fixed seed.
    With them, only the programs run that read such inputs: a decode, for example, reads a position and no text.
    --mode isa executes the program of the target's cores instruction by instruction and counts instructions by engine
    and bytes by memory. ARTIFACT is an artifact of the store, as MODEL@KEY. --device runs its NEFFs on this machine's
    devices; it must be of backend neuronx. A device that is missing or fails is code 31.

    \b
    Example:
      nxpipe run --model-id gpt2 --weights random:0 --text "[464, 2068, 7586]" --mode isa
      nxpipe run --model-id ./my-llama --text "The river rose in the night"
      nxpipe run my-llama@4e9ce0 --chat "Where does the river begin?" --generate 40
      nxpipe run bert-base-uncased@4e9ce0 --input inputs.safetensors --output answers
      nxpipe run bert-base-uncased@4e9ce0 --device
    """
    console: Console = ctx.obj
    options.require_applicable()
    if artifact is not None and (options.model_id or options.names):
        raise click.UsageError("ARTIFACT cannot be combined with --model-id or --only; pass only --store", ctx)
    if input_file is not None and texts:
        raise click.UsageError("--input and --text cannot be combined; pass one of them", ctx)
    if device is not None:
        require_device_options(ctx, artifact)
    require_device_for_limit(ctx, device)
    if chat is not None and (input_file is not None or texts):
        raise click.UsageError("--chat cannot be combined with --input or --text; pass one of them", ctx)
    if new_tokens is not None and chat is None and not texts:
        raise click.UsageError("--generate continues a text; pass --text or --chat too", ctx)
    if device is None and input_file is None and output is None and program is None and (chat is not None or texts):
        model = _generator(artifact, options, store, config_path, execution, console)
        if model is not None:
            _answer(model, [chat] if chat is not None else texts, chat is not None, new_tokens, console)
            return
    if chat is not None or new_tokens is not None:
        raise click.UsageError(
            "--chat and --generate need a model with prefill and decode programs, without --device, --output and "
            "--program",
            ctx,
        )
    inputs = replace(_inputs(input_file, texts, truncate), program=program)
    mode = "device" if device else execution.mode
    if artifact is not None:
        machine = (device, limit) if device else execution
        runs = _artifact_runs(artifact, store, config_path, inputs, machine, console)
    else:
        runs = _model_runs(options, config_path, inputs, execution, console)
    _show(runs, mode, output, console)


def _generator(
    artifact: str | None,
    options: ModelOptions,
    store: str | None,
    config_path: Path,
    execution: ExecutionOptions,
    console: Console,
) -> "ServingModel | None":
    """The model, if it has programs that generate text."""
    if artifact is not None:
        from nxpipe.pipeline.artifacts.store_url import open_configured_store

        opened = open_configured_store(store, config_path, console)
        published = opened.resolve(artifact)
        if not any(each.phase == "decode" for each in published.manifest.executables):
            return None
        from nxpipe.pipeline.serving.model import ServingModel

        model = ServingModel.read(published, opened, execution, console.step)
        return model if model.generates else None
    config = load_config(config_path, os.environ, missing_ok=options.model_id is not None)
    specs = list(options.specs(config, config_path.parent))
    if len(specs) != 1 or specs[0].kind == "file":
        return None
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.serving.model import ServingModel

    model = ServingModel.compiled(BuildSpec.of(specs[0]), execution, console.step)
    return model if model.generates else None


def _answer(
    model: "ServingModel",
    prompts: Sequence[str],
    chat: bool,
    new_tokens: int | None,
    console: Console,
) -> None:
    from nxpipe.pipeline.cli.generate import answer_texts
    from nxpipe.pipeline.serving.sampling import SamplingParams
    from nxpipe.pipeline.serving.text import DEFAULT_TOKENS, require_serving_libraries

    require_serving_libraries()
    params = SamplingParams(max_tokens=new_tokens or DEFAULT_TOKENS, temperature=0.0)
    answer_texts(model, prompts, params, console, chat=chat)


def _show(runs: Iterator["RunResult"], mode: str, output: Path | None, console: Console) -> None:
    """Print each result, and write its outputs."""
    results: list[RunResult] = []
    for result in runs:
        results.append(result)
        if output is not None:
            _write(output / f"{result.program}.safetensors", result.outputs)
        if not console.json:
            console.page(_as_text(result, mode))
    if console.json:
        console.data([_as_json(result, mode) for result in results])


def _inputs(input_file: Path | None, texts: tuple[str, ...], truncate: bool) -> "RunInputs":
    from nxpipe.pipeline.verify.replay import RunInputs

    if input_file is None:
        return RunInputs(texts=texts, truncate=truncate)
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        return RunInputs(load(read_file(input_file, limit=_LARGEST_INPUT)))
    except (SafetensorError, KeyError, DocumentInvalid, OSError) as error:
        raise click.BadParameter(f"{input_file} is not a safetensors file ({error})", param_hint="--input") from error


def _artifact_runs(
    artifact: str,
    store: str | None,
    config_path: Path,
    inputs: "RunInputs",
    machine: ExecutionOptions | tuple[str, float],
    console: Console,
) -> Iterator["RunResult"]:
    """The runs of an artifact, on the emulator, or on the devices of a library with a limit for silent ranks."""
    from nxpipe.pipeline.artifacts.store_url import open_configured_store, open_uncached_store
    from nxpipe.pipeline.util.progress import watching
    from nxpipe.pipeline.verify.device import DeviceOptions
    from nxpipe.pipeline.verify.replay import run_artifact, run_on_devices

    if isinstance(machine, ExecutionOptions):
        opened = open_configured_store(store, config_path, console)
        return run_artifact(opened.resolve(artifact), opened, inputs, machine, console.step)
    opened, watch = open_uncached_store(store, config_path, console), partial(watching, console)
    device, limit = machine
    options = DeviceOptions(device, limit=limit)
    return run_on_devices(opened.resolve(artifact), opened, inputs, options, console.step, watch)


def _model_runs(
    options: ModelOptions, config_path: Path, inputs: "RunInputs", execution: ExecutionOptions, console: Console
) -> Iterator["RunResult"]:
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.replay import run_model

    config = load_config(config_path, os.environ, missing_ok=options.model_id is not None)
    for spec in options.specs(config, config_path.parent):
        yield from run_model(BuildSpec.of(spec), inputs, execution, console.step)


def _as_text(result: "RunResult", mode: str) -> str:
    rows = [
        (name, "x".join(map(str, array.shape)) or "scalar", *(f"{figure:.4g}" for figure in _figures(array)))
        for name, array in result.outputs.items()
    ]
    parts = [for_terminal(f"{result.model}  {result.program}, {mode}, on {result.input_source}")]
    parts += [table(("output", "shape", "min", "mean", "max"), rows, indent="    ")]
    for name in result.outputs:
        for number, row in enumerate(_likeliest(result, name)):
            entries = ", ".join(f"{for_terminal(_label(result, name, entry))} ({share:.3g})" for entry, share in row)
            parts.append(f"  {for_terminal(name)}, row {number}: most likely: {entries}")
    if result.work:
        engines = [(engine, f"{count:,}") for engine, count in sorted(result.work.engines.items())]
        parts += [f"  {statistics_sentence(result.work)}", table(("engine", "instructions"), engines, indent="    ")]
    return "\n".join(parts)


def _as_json(result: "RunResult", mode: str) -> dict[str, object]:
    document: dict[str, object] = {
        "model": result.model,
        "program": result.program,
        "mode": mode,
        "inputs": result.input_source,
        "outputs": {name: _output_json(result, name) for name in result.outputs},
    }
    return document | ({"work": result.work.document()} if result.work else {})


def _output_json(result: "RunResult", name: str) -> dict[str, object]:
    array = result.outputs[name]
    least, mean, most = _figures(array)
    document: dict[str, object] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    document |= {"least": least, "mean": mean, "most": most}
    rows = [
        [{"entry": entry, "label": _label(result, name, entry), "share": share} for entry, share in row]
        for row in _likeliest(result, name)
    ]
    return document | ({"likeliest": rows} if rows else {})


def _label(result: "RunResult", name: str, entry: int) -> str:
    """The name of a class; its number, where the model's configuration has no name for each."""
    classes = result.outputs[name].shape[-1]
    return result.labels.get(entry, str(entry)) if len(result.labels) == classes else str(entry)


def _figures(array: "np.ndarray[Any, Any]") -> tuple[float, float, float]:
    return (float(array.min()), float(array.mean()), float(array.max())) if array.size else (0.0, 0.0, 0.0)


def _likeliest(result: "RunResult", name: str) -> list[list[tuple[int, float]]]:
    """The most probable entries of each row of logits, with their probabilities.

    Logits with a sequence axis are read at the last position that is not padding.
    """
    import numpy as np

    logits = result.outputs[name]
    if not name.endswith("logits") or logits.ndim not in (2, 3):
        return []
    if logits.ndim == 3:
        mask = result.inputs.get("attention_mask")
        has_mask = mask is not None and mask.shape == logits.shape[:2]
        last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1) if has_mask and mask is not None else -1
        logits = logits[np.arange(len(logits)), last]
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    best = np.argsort(-shares, axis=-1, kind="stable")[:, :_LIKELIEST]
    return [[(int(entry), float(row[entry])) for entry in order] for row, order in zip(shares, best, strict=True)]


def _write(path: Path, outputs: "Arrays") -> None:
    import numpy as np
    from safetensors.numpy import save

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(save({name: np.ascontiguousarray(array) for name, array in outputs.items()}))
    except FileExistsError as error:
        raise WouldOverwrite(f"{path} exists already; move it away or pass another --output") from error
