"""Legality of a program on its core: a static check of every documented limit, for all iterations at once.

An address is affine in the loop indices, so its least and greatest value over all iterations follow from its
coefficients and the loop counts (`Affine.bounds`). A limit that holds for both extremes holds for every iteration, so
the check takes one step for each instruction of the text, regardless of the loop counts. Alignment and PSUM banks are
properties of remainders: every coefficient must be a multiple, or the largest remainder is bounded.
"""

from collections.abc import Iterator

from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.constraints import (
    WIDE,
    Fault,
    InstructionContext,
    ProgramInvalid,
    Rule,
    Violation,
    Violations,
    named,
)
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Memory, Tile
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Progress, Role, Step, counted
from nxpipe.emulator.isa.text import labelled, line


def check(program: Program) -> None:
    """Raise ProgramInvalid with all faults of an illegal program."""
    violated = faults(program)
    if violated:
        raise ProgramInvalid(violated)


def faults(program: Program) -> list[Fault]:
    """Every violation, in the order of the text."""
    if program.core not in CORES:
        known = ", ".join(CORES)
        return [Fault(Violation(Rule.GENERATION, f"unknown core {program.core!r}", f"use {known}"))]
    result = [Fault(violation) for violation in _in_table(program)]
    labels = labelled(program.buffers)
    for number, (step, context, before) in enumerate(_Traversal(program).steps(program.body, ())):
        if isinstance(step, Loop):
            result.append(
                Fault(Violation(Rule.LOOP, f"a loop runs {step.count} times", "run it once or more, or remove it"))
            )
            continue
        for violation in (*violations(step, context), *_waits(step, context, before), *_noted(step, program)):
            note = program.notes[step.note] if 0 <= step.note < len(program.notes) else ""
            result.append(Fault(violation, number, line(step, labels), note))
    return result


class _Traversal:
    """A traversal of a program: each instruction with its context and the progress of all engines before it."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._progress = Progress()

    def steps(
        self, body: tuple[Step, ...], counts: tuple[int, ...]
    ) -> Iterator[tuple[Step, InstructionContext, Progress]]:
        context = InstructionContext(CORES[self._program.core], self._program.buffers, self._program.ranks, counts)
        for step in body:
            if isinstance(step, Instruction):
                yield step, context, self._progress
                self._progress.step(step.engine)
            elif step.count < 1:
                yield step, context, self._progress
            else:
                self._progress.enter(step.count, counted(step.body))
                yield from self.steps(step.body, (*counts, step.count))
                self._progress.leave()


def _waits(instruction: Instruction, context: InstructionContext, before: Progress) -> Violations:
    for wait in instruction.waits:
        if wait.engine is instruction.engine:
            yield Violation(
                Rule.WAIT, f"{wait.engine} waits for itself", "remove the wait; an engine executes in order"
            )
            continue
        missing_loops = list(context.loops_exist(wait.done))
        if missing_loops:
            yield from missing_loops
            continue
        if wait.done.bounds(context.counts)[1] < 1:
            yield Violation(Rule.WAIT, f"the wait for {wait.engine} is always fulfilled", "remove it")
        short, _ = (before.done(wait.engine) + wait.done * -1).bounds(context.counts)
        if short < 0:
            yield Violation(
                Rule.WAIT,
                f"waits for {-short} more instructions of {wait.engine} than precede it in program order",
                "wait for fewer: the engine would never proceed",
            )


def _noted(instruction: Instruction, program: Program) -> Violations:
    if not 0 <= instruction.note < max(len(program.notes), 1):
        yield Violation(Rule.BUFFER, f"there is no note {instruction.note}", f"the program has {len(program.notes)}")


def _in_table(program: Program) -> Violations:
    """Violations of the buffer table. Scratch buffers may share addresses, because their lifetimes may be disjoint."""
    if program.ranks < 1:
        yield Violation(Rule.VALUE, f"the program has {program.ranks} ranks", "use one or more")
    for buffer in program.buffers:
        yield from _buffer(buffer)
    furthest: dict[bool, Buffer] = {}  # for scratch (True) and other buffers: the buffer with the highest end so far
    for buffer in sorted(program.buffers, key=lambda buffer: buffer.address):
        is_scratch = buffer.role is Role.SCRATCH
        for other_is_scratch, other in furthest.items():
            if buffer.nbytes and buffer.address < _end(other) and not (is_scratch and other_is_scratch):
                yield Violation(
                    Rule.BUFFER,
                    f"{named(buffer)} begins at {buffer.address} in HBM, and {named(other)} ends at {_end(other)}",
                    "use disjoint addresses",
                )
        if is_scratch not in furthest or _end(buffer) > _end(furthest[is_scratch]):
            furthest[is_scratch] = buffer


def _end(buffer: Buffer) -> int:
    return buffer.address + buffer.nbytes


def _buffer(buffer: Buffer) -> Violations:
    name = named(buffer)
    if buffer.dtype in WIDE:
        yield Violation(Rule.DTYPE, f"{name} is {buffer.dtype}, which the core does not have", "narrow it to 32 bits")
    if buffer.address < 0 or any(size < 0 for size in buffer.shape) or not buffer.names:
        yield Violation(
            Rule.BUFFER,
            f"{name} has {len(buffer.names)} tensors of {list(buffer.shape)} at {buffer.address}",
            "use at least one name, and no negative size or address",
        )
    if buffer.order and sorted(buffer.order) != list(range(len(buffer.shape))):
        yield Violation(
            Rule.BUFFER,
            f"{name} has the order {list(buffer.order)} for {len(buffer.shape)} axes",
            "name each axis once",
        )
    if buffer.tile < 0 or (buffer.tile and (buffer.role is not Role.PARAMETER or len(buffer.shape) < 2)):
        yield Violation(
            Rule.BUFFER,
            f"{name}, a {buffer.role} of {len(buffer.shape)} axes, is in tiles of {buffer.tile} columns",
            "store only matrices that are parameters in tiles",
        )


def violations(instruction: Instruction, context: InstructionContext) -> Violations:
    """The rules that an instruction violates regardless of others: of its engine and operands, then its own."""
    engines, engine = instruction.engines, instruction.engine
    if engines.get(engine, context.core.nki_gen + 1) > context.core.nki_gen:
        able = [name for name, since in engines.items() if since <= context.core.nki_gen]
        yield Violation(
            Rule.ENGINE,
            f"on {context.core.name}, {engine} does not execute {instruction.name}",
            f"use {' or '.join(able)}" if able else "use another instruction",
        )
        return
    for name, place in instruction.places.items():
        yield from context.violations(place, engine)
        if isinstance(place, Tile):
            yield from _reachable(name, place, engine)
    yield from instruction.violations(context)


def _reachable(name: str, tile: Tile, engine: Engine) -> Violations:
    in_psum = tile.memory is Memory.PSUM
    if in_psum and (engine in (Engine.GPSIMD, Engine.COLLECTIVE) or engine in DMA_QUEUES):
        yield Violation(Rule.MEMORY, f"{engine} cannot access {name} in PSUM", "copy it to SBUF first")
    if engine is Engine.TENSOR and in_psum != (name == "dst"):
        yield Violation(
            Rule.MEMORY, f"{name} of the tensor engine is in {tile.memory}", "let it read SBUF and write PSUM"
        )
