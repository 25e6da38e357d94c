"""`nxpipe explain`."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import Command
from pipeline.config import load_config
from pipeline.options import config_option
from pipeline.order_options import order_options, orders, refuse_words_without_effect
from pipeline.output import Console
from pipeline.saved import SavedProgram, axis_option, saved_program

if TYPE_CHECKING:
    from emulator.capture import CaptureRequest
    from emulator.graph import Graph
    from emulator.passes import Pass, PassOptions
    from emulator.passes.shard import Padding
    from pipeline.order import Order

_CAPTURE = "capture"  # before the first pass


@click.command(cls=Command)
@order_options("explain")
@click.option("--after", metavar="PASS", help="Stop after this pass, or after `capture`.  [default: the last pass]")
@click.option("--passes", "listed", is_flag=True, help="List the passes, in their order, and look at no model.")
@axis_option
@config_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    config_path: Path,
    model_id: str | None,
    names: tuple[str, ...],
    axes: tuple[tuple[str, int], ...],
    after: str | None,
    listed: bool,
    **flags: Any,
) -> None:
    """Print a model's programs after one of the compiler's passes.

    A pass that runs a second time is listed with its turn: fold_constants, fold_constants:2. At --tp above 1 the
    program is that of every rank, with the exchanges between ranks in it.

    \b
    Example:
      nxpipe explain --passes
      nxpipe explain --model-id bert-base-uncased --after fuse
      nxpipe explain --model-id ./my-llama --tp 8 --after shard
      nxpipe explain --model-id ./encoder.onnx --axis batch=1
    """
    from emulator.passes import PASSES

    console: Console = ctx.obj
    labels = _labels(PASSES)
    if listed:
        console.data(labels) if console.json else console.result("\n".join(labels))
        return
    if after is not None and after not in labels:
        raise click.BadParameter(f"there is no pass {after!r}; there are {', '.join(labels)}", param_hint="--after")
    refuse_words_without_effect(ctx, model_id, flags)
    file = saved_program(ctx, model_id, flags, axes)
    described = load_config(config_path, os.environ, missing_ok=model_id is not None)
    steps = PASSES[: labels.index(after)] if after else PASSES
    answers = []
    for order in orders(model_id, flags, described, names, config_path.parent):
        for program, graph, padding in _programs(order, file, steps, console):
            label = after or labels[-1]
            said = {"model": order.model_id, "program": program, "after": label, "graph": str(graph)}
            answers.append(said | {"padding": asdict(padding)})
            if not console.json:
                padded = f"; padded with zeros: {padding}" if padding else ""
                console.result(f"{order.model_id} {program} after {label}: {len(graph.nodes)} nodes{padded}\n{graph}\n")
    if console.json:
        console.data(answers)


def _labels(passes: "Sequence[Pass]") -> list[str]:
    """Capture and each pass, by names that tell the second turn of one from its first."""
    turns: Counter[str] = Counter()
    labels = [_CAPTURE]
    for step in passes:
        turns[step.__name__] += 1
        turn = turns[step.__name__]
        labels.append(step.__name__ if turn == 1 else f"{step.__name__}:{turn}")
    return labels


def _programs(
    order: "Order", file: SavedProgram | None, steps: "Sequence[Pass]", console: Console
) -> "Iterator[tuple[str, Graph, Padding]]":
    """Each program by name, and what of it is padding; those of a model are captured exactly as a build of all of them
    captures them."""
    from emulator.capture import capture
    from emulator.passes import PassOptions, run_passes
    from pipeline.request import capture_request, default_phases

    (target,) = order.targets()
    options = PassOptions(order.autocast, order.autocast_type, target.compiler_target, order.tp or 1)
    if file is not None:
        with console.step(f"compile {file.name}"):
            graph, padding = _divided(file.compile(options, steps[: _shard(steps)]), options, steps)
        yield "program", graph, padding
        return
    source = order.source(files=False)
    shapes = order.shapes(source, default_phases(source.task))
    for shape in shapes:
        with console.step(f"compile {shape.name}"):
            request = capture_request(source, shape, shapes)
            planned = _with_plan(options, request)
            whole = run_passes(capture(request), planned, steps[: _shard(steps)])
            graph, padding = _divided(whole, planned, steps)
        yield shape.name, graph, padding


def _shard(steps: "Sequence[Pass]") -> int:
    """Where among passes a model is divided."""
    from emulator.passes.shard import shard

    return steps.index(shard) if shard in steps else len(steps)


def _divided(whole: "Graph", options: "PassOptions", steps: "Sequence[Pass]") -> "tuple[Graph, Padding]":
    """What the passes from the division on make of a graph, and what padding that takes."""
    from emulator.passes import run_passes
    from emulator.passes.shard import NO_PADDING, padding, plan
    from emulator.repeat import unroll

    rest = steps[_shard(steps) :]
    graph = run_passes(whole, options, rest)
    if not rest or options.tensor_parallel == 1:
        return graph, NO_PADDING
    layers = unroll(whole)
    return graph, padding(layers, plan(layers, options.tensor_parallel, dict(options.published_plan)))


def _with_plan(options: "PassOptions", request: "CaptureRequest") -> "PassOptions":
    """The division among ranks that the model's authors published, which a build follows too."""
    if options.tensor_parallel == 1:
        return options
    from emulator.capture.published import published_plan

    return replace(options, published_plan=published_plan(request))
