"""`nxpipe verify`: a model run on the emulator and in PyTorch, on the same weights and inputs, layer by layer if asked.

The yardstick is PyTorch in fp32. PyTorch's own bf16 stands beside the emulator: what a user of that type lives with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.errors import BuildRefused
from pipeline.evidence import Step
from pipeline.machine import available_memory
from pipeline.models.depth import first_layers
from pipeline.output import human_bytes
from pipeline.request import BuildRequest, Shape
from pipeline.verify import Arrays, Deviation, Thresholds, compare

if TYPE_CHECKING:
    from emulator.capture.reference import Answer
    from emulator.graph import Graph, Value
    from pipeline.models.weights import Tensors


@dataclass(frozen=True)
class Trial:
    """What to compare: the modes beside the request's own, the text to read, how deep to look."""

    modes: tuple[str, ...]
    prompts: Sequence[str] = ()
    layers: bool = False
    slice_layers: int | None = None


@dataclass(frozen=True)
class Run:
    """One way of running a program, held against PyTorch fp32."""

    way: str  # "none", "matmult", "all", or "PyTorch bf16"
    outputs: tuple[Deviation, ...]
    layers: tuple[Deviation, ...]

    def faults(self, allowed: Thresholds) -> list[str]:
        return [f"{found.output}: {fault}" for found in self.outputs for fault in found.faults(allowed)]

    def first_divergent(self, allowed: Thresholds) -> str | None:
        """The first layer beyond the thresholds; those before it are not to blame."""
        return next((layer.output for layer in self.layers if layer.faults(allowed)), None)


@dataclass(frozen=True)
class Comparison:
    """All that was found out about one program."""

    program: str
    emulated: tuple[Run, ...]
    pytorch: Run


def compare_model(request: BuildRequest, trial: Trial, step: Step) -> Iterator[Comparison]:
    """Every program of the request, in each mode."""
    from emulator.capture import parameter_specs
    from pipeline.models.weights import Tensors

    if trial.slice_layers is not None:
        source = request.source
        request = replace(request, source=replace(source, config=first_layers(source.config, trial.slice_layers)))
    request.check()
    for shape in sorted(request.shapes):
        tensors = Tensors(request.weights, parameter_specs(request.capture(shape)))
        _refuse_what_memory_cannot_hold(request.source.id, tensors)
        yield _compare_program(request, shape, tensors, trial, step)


def _compare_program(request: BuildRequest, shape: Shape, tensors: "Tensors", trial: Trial, step: Step) -> Comparison:
    from emulator.capture import capture

    with step(f"capture {shape.name}"):
        graph = capture(request.capture(shape))
    inputs = _inputs(request, shape, graph, trial.prompts)
    answers = {}
    for dtype in ("float32", "bfloat16"):
        with step(f"run {shape.name} in PyTorch {dtype}"):
            answers[dtype] = _in_pytorch(request, shape, tensors, dtype, inputs)
    truth = answers["float32"]
    runs = []
    for mode in dict.fromkeys((request.autocast, *trial.modes)):
        with step(f"emulate {shape.name}, autocast {mode}"):
            found = _emulated(replace(request, autocast=mode), graph, tensors, inputs, truth if trial.layers else None)
        runs.append(_held_against(truth, found, mode, inputs))
    return Comparison(shape.name, tuple(runs), _held_against(truth, answers["bfloat16"], "PyTorch bf16", inputs))


def _in_pytorch(
    request: BuildRequest, shape: Shape, tensors: "Tensors", dtype: str, batches: Sequence[Arrays]
) -> list["Answer"]:
    from emulator.capture.reference import Reference

    reference = Reference(request.capture(shape), tensors, dtype)
    return [reference.answer(batch) for batch in batches]


def _emulated(
    request: BuildRequest,
    graph: "Graph",
    tensors: "Tensors",
    batches: Sequence[Arrays],
    layers_like: "list[Answer] | None",
) -> list["Answer"]:
    from emulator.capture.reference import Answer
    from emulator.fast import LoadedGraph
    from emulator.passes import PassOptions, run_passes

    lowered = run_passes(graph, PassOptions(request.autocast, request.autocast_type))
    layers: dict[str, Value] = {}
    if layers_like is not None:
        lowered, layers = _with_layers(lowered, layers_like[0])
    loaded = LoadedGraph(lowered, tensors)
    answers = []
    for batch in batches:
        outputs = loaded.run(batch)
        seen = {name: outputs.pop(_tap(name)) for name in layers}
        answers.append(Answer(outputs, seen))
    return answers


def _with_layers(graph: "Graph", like: "Answer") -> tuple["Graph", dict[str, "Value"]]:
    """The graph with the result of each layer as one more output, where a layer of PyTorch has one of that shape."""
    from emulator.repeat import unroll

    graph = unroll(graph)
    found: dict[str, Value] = {}
    for name, array in like.layers.items():
        of_layer = [
            node.result
            for node in graph.nodes
            if f"{node.origin.module}.".startswith(f"{name}.") and node.result.type.shape == array.shape
        ]
        if of_layer:
            found[name] = of_layer[-1]
    return replace(graph, outputs={**graph.outputs, **{_tap(name): value for name, value in found.items()}}), found


def _tap(layer: str) -> str:
    """A name for a layer's output that no model's own output has."""
    return f"layer {layer}"


def _held_against(truth: list["Answer"], found: list["Answer"], way: str, batches: Sequence[Arrays]) -> Run:
    def rows(answers: list["Answer"], part: str) -> Arrays:
        import numpy as np

        shown = [_attended(getattr(answer, part), batch) for answer, batch in zip(answers, batches, strict=True)]
        return {name: np.concatenate([each[name] for each in shown]) for name in shown[0]}

    known = set(found[0].layers)
    layers = {name: value for name, value in rows(truth, "layers").items() if name in known}
    outputs = compare(rows(found, "outputs"), rows(truth, "outputs"))
    return Run(way, tuple(outputs), tuple(compare(rows(found, "layers"), layers)))


def _attended(arrays: Arrays, batch: Arrays) -> Arrays:
    """Positions that hold padding mean nothing to anybody: leave them out where an array has one row a position."""
    import numpy as np

    mask = batch.get("attention_mask")
    if mask is None:
        return {name: array[np.newaxis] if not array.ndim else array for name, array in arrays.items()}
    inside = mask.astype(np.bool_)
    return {
        name: array[inside] if array.ndim > 2 and array.shape[:2] == mask.shape else array
        for name, array in arrays.items()
    }


def _inputs(request: BuildRequest, shape: Shape, graph: "Graph", prompts: Sequence[str]) -> Sequence[Arrays]:
    """Random ids from a fixed seed; or the prompts, cut and padded to the program's shape, a batch after another."""
    from emulator.capture import example_inputs

    random = example_inputs(graph, request.source.config, seed=0)
    if not prompts:
        return [random]
    if set(random) != {"input_ids", "attention_mask"}:
        raise BuildRefused(
            f"{request.source.id} {shape.name}: reads {', '.join(random)}, so no prompt alone can feed it; "
            "leave out --prompts, or pass --phases prefill"
        )
    from pipeline.models.prompts import batches_of

    return batches_of(prompts, request.source, shape.batch, shape.sequence)


def _refuse_what_memory_cannot_hold(model: str, tensors: "Tensors") -> None:
    """PyTorch and the emulator take turns, each with a copy of the weights in fp32 and some more while it loads."""
    need = 6 * sum(kind.elements for kind in tensors.kinds.values())
    room = available_memory()
    if need > room:
        raise BuildRefused(
            f"{model}: running it needs about {human_bytes(need)} of memory, and {human_bytes(room)} are free; "
            "pass --slice-layers N to verify its first N layers"
        )
