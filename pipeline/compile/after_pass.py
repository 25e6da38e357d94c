"""A model's programs as they are after one of the compiler's passes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from nxpipe.pipeline.saved import SavedProgram, is_saved
from nxpipe.pipeline.util.files import expanded
from nxpipe.pipeline.verify.evidence import Step

if TYPE_CHECKING:
    from nxpipe.emulator.capture import CaptureRequest
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.passes import Pass, PassOptions
    from nxpipe.emulator.passes.shard import Padding
    from nxpipe.pipeline.build.asked import Asked

_CAPTURE = "capture"  # before the first pass


def labels(passes: "Sequence[Pass]") -> list[str]:
    """Capture and each pass, by names that tell the second turn of one from its first."""
    turns: Counter[str] = Counter()
    found = [_CAPTURE]
    for step in passes:
        turns[step.__name__] += 1
        turn = turns[step.__name__]
        found.append(step.__name__ if turn == 1 else f"{step.__name__}:{turn}")
    return found


def backend_labels() -> list[str]:
    """Names of the back end's steps, which follow the passes."""
    from nxpipe.emulator.lower import BACKEND

    return [step.__name__ for step in BACKEND]


def lowered(asked: "Asked", graph: "Graph", after: str) -> str:
    """The record of the back end after one of its steps, for a graph that all passes have rewritten."""
    from nxpipe.emulator.lower import record_text

    (target,) = asked.order.targets()
    return record_text(graph, target.core, asked.order.tp or 1, after)


def programs(asked: "Asked", steps: "Sequence[Pass]", step: Step) -> "Iterator[tuple[str, Graph, Padding]]":
    """Each program by name, and what of it is padding; those of a model are captured exactly as a build of all of them
    captures them."""
    from nxpipe.emulator.capture import capture
    from nxpipe.emulator.passes import PassOptions, run_passes
    from nxpipe.pipeline.request import capture_request, default_phases

    order = asked.order
    (target,) = order.targets()
    options = PassOptions(order.autocast, order.autocast_type, target.compiler_target, order.tp or 1)
    if is_saved(order.model_id):
        file = SavedProgram(expanded(order.model_id), dict(asked.axes))
        with step(f"compile {file.name}"):
            graph, padding = _divided(file.compile(options, steps[: _shard(steps)]), options, steps)
        yield "program", graph, padding
        return
    source = order.source(files=False)
    shapes = order.shapes(source, default_phases(source.task))
    for shape in shapes:
        with step(f"compile {shape.name}"):
            request = capture_request(source, shape, shapes)
            planned = _with_plan(options, request)
            whole = run_passes(capture(request), planned, steps[: _shard(steps)])
            graph, padding = _divided(whole, planned, steps)
        yield shape.name, graph, padding


def _shard(steps: "Sequence[Pass]") -> int:
    """Where among passes a model is divided."""
    from nxpipe.emulator.passes.shard import shard

    return steps.index(shard) if shard in steps else len(steps)


def _divided(whole: "Graph", options: "PassOptions", steps: "Sequence[Pass]") -> "tuple[Graph, Padding]":
    """What the passes from the division on make of a graph, and what padding that takes."""
    from nxpipe.emulator.ir.repeat import unroll
    from nxpipe.emulator.passes import run_passes
    from nxpipe.emulator.passes.shard import NO_PADDING, padding, plan

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
    from nxpipe.emulator.capture.model import published_plan

    return replace(options, published_plan=published_plan(request))
