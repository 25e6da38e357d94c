"""Balance between the vector and the scalar engine: copies and products with a number run on the less busy one.

Kernels give every copy out of PSUM to the vector engine, which then is the busiest one of most models. The scalar
engine computes `function(src * scale + bias)` in float32 as well, with the same rounding, so that an instruction of the
form `src`, `src * a` or `src * a + b` gives the same bits on either. In each region, which is a kernel's loop or the
instructions of one place of the model between loops, the longest such instructions move first, as long as the busier
engine gets less busy. In a loop, each move must also shorten the simulated timeline: the copies of one iteration may
delay the scalar engine's functions that another engine waits for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Final

from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.constraints import InstructionContext
from nxpipe.emulator.isa.cost import cost
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction
from nxpipe.emulator.isa.legality import violations
from nxpipe.emulator.isa.program import Loop, Program, Step, within
from nxpipe.emulator.isa.scalar import Activation, Function
from nxpipe.emulator.isa.vector import TensorCopy, TensorScalar
from nxpipe.emulator.lower.kernel import Allocation
from nxpipe.emulator.lower.loop_pipelining import is_repeat, sampled, simulated_ns
from nxpipe.emulator.lower.records import ResidentProgram

_FLOATS: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def balance_engines(resident: ResidentProgram) -> ResidentProgram:
    """Move instructions from the vector to the scalar engine where that makes the busier one less busy."""
    body = tuple(_Balance(resident).steps(resident.body, ()))
    return replace(resident, body=body)


@dataclass(frozen=True)
class _Move:
    """An instruction on the vector engine, and what it gains there and costs on the scalar engine, in ns."""

    step: Instruction
    vector: float
    scalar: float


@dataclass
class _Simulation:
    """The shortest simulated time of a kernel's loop so far."""

    part: Program
    counts: tuple[int, ...]
    allocations: Mapping[int, Allocation]
    ns: float = float("inf")

    def is_faster(self, steps: Sequence[Step]) -> bool:
        """True if the steps are faster than all before."""
        (loop,) = steps
        assert isinstance(loop, Loop)
        ns = simulated_ns(replace(self.part, body=(sampled(loop) or loop,)), self.counts, self.allocations)
        if ns >= self.ns:
            return False
        self.ns = ns
        return True


class _Balance:
    def __init__(self, resident: ResidentProgram) -> None:
        target = resident.emitted.placed.target
        self._core, self._ranks, self._buffers = CORES[target.core], target.ranks, resident.buffers
        self._allocations = resident.emitted.allocations

    def steps(self, body: Sequence[Step], counts: tuple[int, ...]) -> Iterator[Step]:
        """The steps of a program or of a repeat's body; its regions are balanced one by one."""
        for _, region in groupby(body, key=lambda step: id(step) if isinstance(step, Loop) else step.note):
            steps = tuple(region)
            first = steps[0]
            if isinstance(first, Loop) and is_repeat(first, len(counts), self._allocations):
                yield Loop(first.count, tuple(self.steps(first.body, (*counts, first.count))))
            else:
                yield from self._region(steps, counts)

    def _region(self, steps: tuple[Step, ...], counts: tuple[int, ...]) -> tuple[Step, ...]:
        busy = {Engine.VECTOR: 0.0, Engine.SCALAR: 0.0}
        moves: list[_Move] = []
        for step, inside in within(steps, counts):
            if step.engine in busy:
                busy[step.engine] += self._ns(step, inside)
            if step.engine is Engine.VECTOR and (other := self._on_scalar(step, inside)):
                moves.append(_Move(step, self._ns(step, inside), self._ns(other, inside)))
        simulated = self._simulation(steps, counts) if moves else None
        for move in sorted(moves, key=lambda move: -move.vector):
            vector, scalar = busy[Engine.VECTOR] - move.vector, busy[Engine.SCALAR] + move.scalar
            if max(vector, scalar) >= max(busy.values()):
                continue
            changed = tuple(self._changed(step, move.step, counts) for step in steps)
            if simulated is None or simulated.is_faster(changed):
                busy, steps = {Engine.VECTOR: vector, Engine.SCALAR: scalar}, changed
        return steps

    def _simulation(self, steps: tuple[Step, ...], counts: tuple[int, ...]) -> "_Simulation | None":
        loop = steps[0]
        if not isinstance(loop, Loop) or sampled(loop) is None:
            return None
        part = Program(self._core.name, self._ranks, self._buffers, ())
        simulation = _Simulation(part, counts, self._allocations)
        simulation.is_faster(steps)
        return simulation

    def _changed(self, step: Step, moved: Instruction, counts: tuple[int, ...]) -> Step:
        if isinstance(step, Loop):
            return Loop(step.count, tuple(self._changed(inner, moved, (*counts, step.count)) for inner in step.body))
        return (self._on_scalar(step, counts) or step) if step is moved else step

    def _ns(self, step: Instruction, counts: tuple[int, ...]) -> float:
        return prod(counts) * cost(step, self._core).ns

    def _on_scalar(self, step: Instruction, counts: tuple[int, ...]) -> Instruction | None:
        """The same computation on the scalar engine; None if it has none with the same bits."""
        other = _activation(step)
        if other is None or any(place.dtype not in _FLOATS for place in other.places.values()):
            return None
        context = InstructionContext(self._core, self._buffers, self._ranks, counts)
        return None if next(violations(other, context), None) else other


def _activation(step: Instruction) -> Activation | None:
    match step:
        case TensorCopy(dst=dst, src=src):
            scale, bias = 1.0, 0.0
        case TensorScalar(dst=dst, src=src, op0=Alu.MULTIPLY, operand0=scale, op1=None, reverse0=False):
            bias = 0.0
        case TensorScalar(
            dst=dst,
            src=src,
            op0=Alu.MULTIPLY,
            operand0=scale,
            op1=Alu.ADD,
            operand1=bias,
            reverse0=False,
            reverse1=False,
        ):
            pass
        case _:
            return None
    return Activation(
        engine=Engine.SCALAR, note=step.note, dst=dst, src=src, function=Function.COPY, scale=scale, bias=bias
    )
