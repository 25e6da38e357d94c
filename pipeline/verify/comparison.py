"""A program run on the emulator and by a reference, on the same weights and inputs, layer by layer if asked.

The yardstick is the first reference of a case: PyTorch in fp32 for a model. Others stand beside the emulator, as
PyTorch's own bf16 does: what a user of that type lives with.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from nxpipe.pipeline.util.errors import NotEnoughMemory
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.runner import FAST, Execution, Runner
from nxpipe.pipeline.verify.verify import Arrays, Deviation, Thresholds, compare

if TYPE_CHECKING:
    from nxpipe.emulator.capture.request import Answer
    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.core import Statistics
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.nodes import Value

Batches: TypeAlias = Sequence[Arrays]
Asked: TypeAlias = "Callable[[Batches], list[Answer]]"
# A compiled program; what somebody wants to see inside of it is added to the graph before that is divided among ranks.
Tap: TypeAlias = "Callable[[Graph], Graph]"
Compiled: TypeAlias = "Callable[[Tap], Program]"
# The answers, with layers like those, if given; and what they took, if that was counted.
Emulated: TypeAlias = "Callable[[Batches, Answer | None], tuple[list[Answer], Statistics | None]]"


@dataclass(frozen=True)
class Trial:
    """What to compare: the autocast modes beside the one asked for, the text to read, how deep and how far to look,
    and who carries the programs out."""

    modes: tuple[str, ...] = ()
    prompts: Sequence[str] = ()
    layers: bool = False
    slice_layers: int | None = None
    steps: int = 0
    execution: Execution = FAST
    truncate: bool = False  # prompts that are longer than the largest bucket


@dataclass(frozen=True)
class Case:
    """One program, what it is fed, and who answers: the emulator in some ways, references beside it."""

    program: str
    fed: str  # in words: where the inputs come from
    inputs: Batches
    ways: Mapping[str, Emulated]
    references: Mapping[str, Asked]  # the first is the yardstick


@dataclass(frozen=True)
class Run:
    """One way of running a program, held against the yardstick."""

    way: str  # "none", "matmult", "all", or the name of a reference
    outputs: tuple[Deviation, ...]
    layers: tuple[Deviation, ...] = ()
    work: "Statistics | None" = None  # of each core

    def faults(self, allowed: Thresholds) -> list[str]:
        return [f"{found.output}: {fault}" for found in self.outputs for fault in found.faults(allowed)]

    def layer_faults(self, allowed: Thresholds) -> list[str]:
        """Those of the first layer beyond the thresholds."""
        found = ((layer.output, layer.faults(allowed)) for layer in self.layers)
        return next(([f"layer {name}: {fault}" for fault in faults] for name, faults in found if faults), [])

    def first_divergent(self, allowed: Thresholds) -> str | None:
        """The first layer beyond the thresholds; those before it are not to blame."""
        return next((layer.output for layer in self.layers if layer.faults(allowed)), None)


@dataclass(frozen=True)
class Comparison:
    """All that was found out about one program."""

    program: str
    fed: str
    yardstick: str
    emulated: tuple[Run, ...]
    beside: tuple[Run, ...]


def compare_case(case: Case, step: Step, *, layers: bool = False) -> Comparison:
    """The case's ways and references, each held against the first reference."""
    answers = {}
    for name, ask in case.references.items():
        with step(f"run {case.program} in {name}"):
            answers[name] = ask(case.inputs)
    yardstick, *others = answers
    truth = answers[yardstick]
    runs = []
    for way, emulate in case.ways.items():
        with step(f"emulate {case.program}, {way}"):
            found, work = emulate(case.inputs, truth[0] if layers else None)
        runs.append(replace(_held_against(truth, found, way, case.inputs, layers), work=work))
    beside = tuple(_held_against(truth, answers[name], name, case.inputs, layers) for name in others)
    return Comparison(case.program, case.fed, yardstick, tuple(runs), beside)


def as_it_is(graph: "Graph") -> "Graph":
    return graph


def on_emulator(compiled: Compiled, parameters: Arrays, executor: Runner) -> Emulated:
    """The emulator's answers with a program that is compiled when it is its turn, from all of its ranks."""

    def emulate(batches: Batches, layers_like: "Answer | None") -> tuple[list["Answer"], "Statistics | None"]:
        from nxpipe.emulator.capture.request import Answer

        like = {} if layers_like is None else layers_like.layers
        program = compiled(partial(_with_layers, like=like) if like else as_it_is)
        layers = [name for name in like if _tap(name) in program.graph.outputs]
        loaded = executor.load(program, parameters)
        answers = []
        for batch in batches:
            outputs = loaded.run(batch)
            seen = {name: outputs.pop(_tap(name)) for name in layers}
            answers.append(Answer(outputs, seen))
        return answers, loaded.work

    return emulate


def _with_layers(graph: "Graph", like: Arrays) -> "Graph":
    """The graph with the result of each layer as one more output, where a layer of PyTorch has one of that shape."""
    from nxpipe.emulator.ir.repeat import unroll

    graph = unroll(graph)
    found: dict[str, Value] = {}
    for name, array in like.items():
        of_layer = [
            node.result
            for node in graph.nodes
            if f"{node.origin.module}.".startswith(f"{name}.") and node.result.type.shape == array.shape
        ]
        if of_layer:
            found[name] = of_layer[-1]
    return replace(graph, outputs={**graph.outputs, **{_tap(name): value for name, value in found.items()}})


def _tap(layer: str) -> str:
    """A name for a layer's output that no model's own output has."""
    return f"layer {layer}"


def _held_against(truth: list["Answer"], found: list["Answer"], way: str, batches: Batches, layers: bool) -> Run:
    def rows(answers: list["Answer"], part: str) -> Arrays:
        import numpy as np

        shown = [_attended(getattr(answer, part), batch) for answer, batch in zip(answers, batches, strict=True)]
        return {name: np.concatenate([each[name] for each in shown]) for name in shown[0]}

    outputs = tuple(compare(rows(found, "outputs"), rows(truth, "outputs")))
    if not layers:
        return Run(way, outputs)
    known = set(found[0].layers)
    expected = {name: value for name, value in rows(truth, "layers").items() if name in known}
    return Run(way, outputs, tuple(compare(rows(found, "layers"), expected)))


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


def refuse_what_memory_cannot_hold(model: str, kinds: Mapping[str, Any]) -> None:
    """The references and the emulator take turns, each with a copy of the weights in fp32 and some more to load."""
    need = 6 * sum(kind.elements for kind in kinds.values())
    room = available_memory()
    if need > room:
        raise NotEnoughMemory(
            f"{model}: running it needs about {human_bytes(need)} of memory, and {human_bytes(room)} are free; "
            "pass --slice-layers N to verify its first N layers"
        )
