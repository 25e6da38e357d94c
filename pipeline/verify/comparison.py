"""Comparison of a program on the emulator with references, on the same weights and inputs, optionally by layer.

Deviations are relative to the first reference of a case: PyTorch in fp32 for a model. Other references, such as PyTorch
in bf16, are compared with it too, to show the error of the narrow type alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from nxpipe.pipeline.models.thresholds import Deviation, Thresholds
from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.errors import NotEnoughMemory
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.progress import Step
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.evidence import compare
from nxpipe.pipeline.verify.execution import FAST, ExecutionOptions, Runner

if TYPE_CHECKING:
    from nxpipe.emulator.capture.request import ModelOutputs
    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.core.machine import Statistics
    from nxpipe.emulator.ir.graph import Graph
    from nxpipe.emulator.ir.nodes import Value

Batches: TypeAlias = Sequence[Arrays]
ReferenceRun: TypeAlias = "Callable[[Batches], list[ModelOutputs]]"
# Compiles a program; its tap adds outputs to the graph before it is sharded.
CompileTapped: TypeAlias = "Callable[..., CompiledGraph]"
# The answers, with the same layers as the reference answer, if one is passed; and the instruction counts, if any.
EmulatedRun: TypeAlias = "Callable[[Batches, ModelOutputs | None], tuple[list[ModelOutputs], Statistics | None]]"


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `nxpipe verify`: further autocast modes, prompts, layers, decode steps, and how programs run."""

    modes: tuple[str, ...] = ()
    prompts: Sequence[str] = ()
    layers: bool = False
    slice_layers: int | None = None
    steps: int = 0
    execution: ExecutionOptions = FAST
    truncate: bool = False  # cut prompts that are longer than the largest bucket


@dataclass(frozen=True)
class Case:
    """One program, its inputs, the variants that the emulator or a device runs, and the references."""

    program: str
    input_source: str
    inputs: Batches
    variants: Mapping[str, EmulatedRun]
    references: Mapping[str, ReferenceRun]  # deviations are relative to the first
    work: str = "emulate"  # what is done for a variant, in the progress; "compare" for one that has run


@dataclass(frozen=True)
class VariantResult:
    """The deviations of one variant of a program, or of another reference."""

    variant: str  # "none", "matmult", "all", or the name of a reference
    outputs: tuple[Deviation, ...]
    layers: tuple[Deviation, ...] = ()
    work: "Statistics | None" = None  # of each core

    def faults(self, allowed: Thresholds) -> list[str]:
        return [f"{output.output} {fault}" for output in self.outputs for fault in output.faults(allowed)]

    def layer_faults(self, allowed: Thresholds) -> list[str]:
        """The faults of the first layer beyond the thresholds: later layers compute with its outputs."""
        layers = ((layer.output, layer.faults(allowed)) for layer in self.layers)
        return next(([f"layer {name} {fault}" for fault in faults] for name, faults in layers if faults), [])

    def first_divergent(self, allowed: Thresholds) -> str | None:
        """The first layer beyond the thresholds."""
        return next((layer.output for layer in self.layers if layer.faults(allowed)), None)


@dataclass(frozen=True)
class Comparison:
    """The result of one case."""

    program: str
    input_source: str
    reference: str
    emulated: tuple[VariantResult, ...]
    other_references: tuple[VariantResult, ...]


def compare_case(case: Case, step: Step, *, layers: bool = False) -> Comparison:
    """Run all variants and references of a case, and compare each with the first reference."""
    answers = {}
    for name, run_reference in case.references.items():
        with step(f"run {case.program} in {name}"):
            answers[name] = run_reference(case.inputs)
    reference, *others = answers
    truth = answers[reference]
    runs = []
    for variant, emulate in case.variants.items():
        with step(f"{case.work} {case.program}, {variant}"):
            emulated, work = emulate(case.inputs, truth[0] if layers else None)
        runs.append(replace(_deviations(truth, emulated, variant, case.inputs, layers), work=work))
    other_references = tuple(_deviations(truth, answers[name], name, case.inputs, layers) for name in others)
    return Comparison(case.program, case.input_source, reference, tuple(runs), other_references)


def on_emulator(compiled: CompileTapped, parameters: Arrays, executor: Runner) -> EmulatedRun:
    """A function that compiles a program and returns the emulator's answers from all its ranks."""

    def emulate(
        batches: Batches, layers_like: "ModelOutputs | None"
    ) -> tuple[list["ModelOutputs"], "Statistics | None"]:
        from nxpipe.emulator.capture.request import ModelOutputs

        like = {} if layers_like is None else layers_like.layers
        program = compiled(tap=partial(_with_layers, like=like) if like else None)
        layers = [name for name in like if _tap(name) in program.graph.outputs]
        loaded = executor.load(program, parameters)
        answers = []
        for batch in batches:
            outputs = loaded.run(batch)
            of_layers = {name: outputs.pop(_tap(name)) for name in layers}
            answers.append(ModelOutputs(outputs, of_layers))
        return answers, loaded.work

    return emulate


def _with_layers(graph: "Graph", like: Arrays) -> "Graph":
    """The graph with the result of each layer as an additional output, if PyTorch's layer has a result of that
    shape."""
    from nxpipe.emulator.ir.repeat import unroll

    graph = unroll(graph)
    results: dict[str, Value] = {}
    for name, array in like.items():
        candidates = [
            node.result
            for node in graph.nodes
            if f"{node.origin.module}.".startswith(f"{name}.") and node.result.type.shape == array.shape
        ]
        if candidates:
            results[name] = candidates[-1]
    return replace(graph, outputs={**graph.outputs, **{_tap(name): value for name, value in results.items()}})


def _tap(layer: str) -> str:
    """A name for a layer's output that differs from all outputs of models."""
    return f"layer {layer}"


def _deviations(
    truth: list["ModelOutputs"], ours: list["ModelOutputs"], variant: str, batches: Batches, layers: bool
) -> VariantResult:
    def rows(answers: list["ModelOutputs"], part: str) -> Arrays:
        import numpy as np

        shown = [_attended(getattr(answer, part), batch) for answer, batch in zip(answers, batches, strict=True)]
        return {name: np.concatenate([arrays[name] for arrays in shown]) for name in shown[0]}

    outputs = tuple(compare(rows(ours, "outputs"), rows(truth, "outputs")))
    if not layers:
        return VariantResult(variant, outputs)
    known = set(ours[0].layers)
    expected = {name: value for name, value in rows(truth, "layers").items() if name in known}
    return VariantResult(variant, outputs, tuple(compare(rows(ours, "layers"), expected)))


def _attended(arrays: Arrays, batch: Arrays) -> Arrays:
    """The arrays without padding positions, if they have a row for each position."""
    import numpy as np

    mask = batch.get("attention_mask")
    if mask is None:
        return {name: array[np.newaxis] if not array.ndim else array for name, array in arrays.items()}
    inside = mask.astype(np.bool_)
    return {
        name: array[inside] if array.ndim > 2 and array.shape[:2] == mask.shape else array
        for name, array in arrays.items()
    }


def require_memory(model: str, kinds: Mapping[str, Any]) -> None:
    """Raise NotEnoughMemory if the reference or the emulator, which run in turn, cannot hold an fp32 copy of the
    weights."""
    need = 6 * sum(kind.elements for kind in kinds.values())
    free = available_memory()
    if need > free:
        raise NotEnoughMemory(
            f"{model}: running it needs about {human_bytes(need)} of memory, and {human_bytes(free)} are free; "
            "pass --slice-layers N to verify its first N layers"
        )
