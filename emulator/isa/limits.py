"""Whether a program is legal on its core, without running it: every documented limit, for all turns of all loops."""

from collections.abc import Iterator

from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.faults import Breaches, Broken, Fault, ProgramInvalid, Rule
from nxpipe.emulator.isa.instructions import Instruction
from nxpipe.emulator.isa.places import WIDE, Room, named
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step, counted
from nxpipe.emulator.isa.progress import Progress
from nxpipe.emulator.isa.rules import broken
from nxpipe.emulator.isa.text import labelled, line


def check(program: Program) -> None:
    found = faults(program)
    if found:
        raise ProgramInvalid(found)


def faults(program: Program) -> list[Fault]:
    """All of them, in the order of the text."""
    if program.core not in CORES:
        known = ", ".join(CORES)
        return [Fault(Broken(Rule.GENERATION, f"there is no core {program.core!r}", f"there are {known}"))]
    found = [Fault(each) for each in _in_table(program)]
    labels = labelled(program.buffers)
    for number, (step, room, before) in enumerate(_Walk(program).steps(program.body, ())):
        if isinstance(step, Loop):
            found.append(
                Fault(Broken(Rule.LOOP, f"a loop runs {step.count} times", "run it once or more, or leave it"))
            )
            continue
        for each in (*broken(step, room), *_waits(step, room, before), *_noted(step, program)):
            note = program.notes[step.note] if 0 <= step.note < len(program.notes) else ""
            found.append(Fault(each, number, line(step, labels), note))
    return found


class _Walk:
    """Each instruction, with what is around it and how many each engine has done before it in program order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._progress = Progress()

    def steps(self, body: tuple[Step, ...], counts: tuple[int, ...]) -> Iterator[tuple[Step, Room, Progress]]:
        room = Room(CORES[self._program.core], self._program.buffers, self._program.ranks, counts)
        for step in body:
            if isinstance(step, Instruction):
                yield step, room, self._progress
                self._progress.step(step.engine)
            elif step.count < 1:
                yield step, room, self._progress
            else:
                self._progress.enter(step.count, counted(step.body))
                yield from self.steps(step.body, (*counts, step.count))
                self._progress.leave()


def _waits(instruction: Instruction, room: Room, before: Progress) -> Breaches:
    for wait in instruction.waits:
        if wait.engine is instruction.engine:
            yield Broken(Rule.WAIT, f"{wait.engine} waits for itself", "leave it out: an engine keeps its order")
            continue
        wrong = list(room.follows(wait.done))
        if wrong:
            yield from wrong
            continue
        if wait.done.bounds(room.counts)[1] < 1:
            yield Broken(Rule.WAIT, f"it waits for nothing of {wait.engine} in any turn", "leave it out")
        short, _ = (before.done(wait.engine) + wait.done * -1).bounds(room.counts)
        if short < 0:
            yield Broken(
                Rule.WAIT,
                f"it waits for {-short} more of {wait.engine} than come before it in program order",
                "wait for less: it could never go on",
            )


def _noted(instruction: Instruction, program: Program) -> Breaches:
    if not 0 <= instruction.note < max(len(program.notes), 1):
        yield Broken(Rule.BUFFER, f"there is no note {instruction.note}", f"there are {len(program.notes)}")


def _in_table(program: Program) -> Breaches:
    """The buffers by themselves, and beside each other: scratch may lie where other scratch lies, at other times."""
    if program.ranks < 1:
        yield Broken(Rule.VALUE, f"{program.ranks} ranks run it", "let one or more run it")
    for buffer in program.buffers:
        yield from _buffer(buffer)
    furthest: dict[bool, Buffer] = {}  # the one that ends last of scratch, and of the others
    for buffer in sorted(program.buffers, key=lambda buffer: buffer.address):
        is_scratch = buffer.role is Role.SCRATCH
        for other_is_scratch, other in furthest.items():
            if buffer.nbytes and buffer.address < _end(other) and not (is_scratch and other_is_scratch):
                yield Broken(
                    Rule.BUFFER,
                    f"{named(buffer)} begins at {buffer.address} in HBM, and {named(other)} ends at {_end(other)}",
                    "give each its own place",
                )
        if is_scratch not in furthest or _end(buffer) > _end(furthest[is_scratch]):
            furthest[is_scratch] = buffer


def _end(buffer: Buffer) -> int:
    return buffer.address + buffer.nbytes


def _buffer(buffer: Buffer) -> Breaches:
    name = named(buffer)
    if buffer.dtype in WIDE:
        yield Broken(Rule.DTYPE, f"{name} is {buffer.dtype}", "the machine has no such type; narrow it to 32 bits")
    if buffer.address < 0 or any(size < 0 for size in buffer.shape) or not buffer.names:
        yield Broken(
            Rule.BUFFER,
            f"{name} has {len(buffer.names)} tensors of {list(buffer.shape)} at {buffer.address}",
            "give it a name, sizes and an address that are not negative",
        )
    if buffer.order and sorted(buffer.order) != list(range(len(buffer.shape))):
        yield Broken(
            Rule.BUFFER, f"{name} has the order {list(buffer.order)} of {len(buffer.shape)} axes", "name each axis once"
        )
