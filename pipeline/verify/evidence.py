"""What shows that an artifact is right: every program emulated, and held against PyTorch fp32 on the same weights."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.util.errors import NotEnoughMemory, VerificationFailed
from nxpipe.pipeline.util.process import available_memory
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.verify import Arrays, Deviation, Thresholds, compare

if TYPE_CHECKING:
    from nxpipe.emulator.compile import Program
    from nxpipe.pipeline.verify.materials import Materials

Step: TypeAlias = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Found:
    """How far each output is, what the program was fed and what it answered, the last two as safetensors."""

    deviations: list[Deviation]
    inputs: bytes
    answers: bytes


def gather(
    request: BuildRequest,
    shape: Shape,
    program: "Program",
    materials: "Materials",
    step: Step,
    thresholds: Thresholds,
) -> Found:
    """Run a program both ways, all of its ranks together; an answer beyond the thresholds is an error."""
    _refuse_what_memory_cannot_hold(request.source.id, materials)
    inputs, ours, reference = _both_answers(request, shape, program, materials.loaded(step), step)
    deviations = compare(ours, reference)
    _insist(f"{request.source.id} {shape.name}: against {request.yardstick}", deviations, thresholds)
    return Found(deviations, _safetensors(inputs), _safetensors(ours))


def _both_answers(
    request: BuildRequest, shape: Shape, program: "Program", weights: Arrays, step: Step
) -> tuple[Arrays, Arrays, Arrays]:
    from nxpipe.emulator.capture import example_inputs
    from nxpipe.emulator.run.ranks import LoadedProgram, LoadedRanks

    inputs = example_inputs(program.whole, request.source.config, seed=0)
    ranks = f" on {program.degree} ranks" if program.degree > 1 else ""
    with step(f"emulate {shape.name}{ranks}"):
        ours = LoadedProgram(program, LoadedRanks(program.graph, weights)).run(inputs)
    with step(f"run {shape.name} in {request.yardstick}"):
        return inputs, ours, request.truth(shape, weights, inputs)


def _insist(program: str, deviations: list[Deviation], thresholds: Thresholds) -> None:
    for found in deviations:
        if faults := found.faults(thresholds):
            raise VerificationFailed(
                f"{program}, output {found.output} is beyond [verify]: {'; '.join(faults)}; "
                "try --autocast none, or change [verify]"
            )


def _refuse_what_memory_cannot_hold(model: str, materials: "Materials") -> None:
    """The reference keeps fp32 weights, and the emulator its rounded copy, beside the weights themselves."""
    beside = 2 if materials.are_loaded else 3
    need = beside * 4 * sum(kind.elements for kind in materials.tensors.kinds.values())
    room = available_memory()
    if need > room:
        raise NotEnoughMemory(
            f"{model}: comparing its answers needs about {human_bytes(need)} of memory, and {human_bytes(room)} are "
            "free; pass --no-verify to publish without the comparison"
        )


def _safetensors(values: Arrays) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    data: bytes = save({name: np.ascontiguousarray(value) for name, value in values.items()})
    return data
