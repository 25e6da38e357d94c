"""All small mutations of an emitted program, one at a time.

A mutant is a program with one change, which simulates either damage after emission or, with its waits inserted again, a
defect of the lowering: then only the computed values can reveal it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Far, Place, Tile
from nxpipe.emulator.isa.program import Loop, Program, Step
from tests.core.hands import with_waits
from tests.mutation import alter
from tests.mutation.alter import Changed, having
from tests.mutation.samples import Sample, samples

Edits = Mapping[int, tuple[Step, ...]]  # by the number of a step in the text, loops included


@dataclass(frozen=True)
class Mutant:
    kind: str
    sample: Sample
    original: Program
    edits: Edits
    what: str
    anew: bool = False  # the waits of the instruction

    @property
    def program(self) -> Program:
        made = replace(self.original, body=_edited(self.original.body, self.edits))
        return with_waits(made) if self.anew else made

    @property
    def is_wait(self) -> bool:
        return self.kind in WAITS

    def __str__(self) -> str:
        return f"{self.sample.name}: {self.what}" + (", waits made anew" if self.anew else "")


def drawn(each: int, seed: int) -> list[Mutant]:
    """So many mutants of each kind, or all that there are; of those that do not concern waits half with theirs made
    anew."""
    random, found = Random(seed), list[Mutant]()
    everything = [mutant for sample, program in samples() for mutant in mutants(sample, program)]
    for kind in KINDS:
        alike = [mutant for mutant in everything if mutant.kind == kind]
        for mutant in random.sample(alike, min(each, len(alike))):
            found.append(replace(mutant, anew=kind not in ONLY_DAMAGED and random.random() < 0.5))
    return found


def mutants(sample: Sample, program: Program) -> Iterator[Mutant]:
    """All mutants."""
    for kind, edits in KINDS.items():
        for what, edit in edits(program):
            yield Mutant(kind, sample, program, edit, what)


def _edited(body: Sequence[Step], edits: Edits) -> tuple[Step, ...]:
    def walk(steps: Sequence[Step], number: int) -> tuple[tuple[Step, ...], int]:
        found: list[Step] = []
        for step in steps:
            here, number = number, number + 1
            if isinstance(step, Loop):
                inner, number = walk(step.body, number)
                step = Loop(step.count, inner)
            found += edits.get(here, (step,))
        return tuple(found), number

    return walk(body, 0)[0]


def _numbered(body: Sequence[Step], number: int = 0) -> Iterator[tuple[int, Step, Sequence[Step]]]:
    """Each step with its number, and the neighbouring steps."""
    for step in body:
        yield number, step, body
        number += 1
        if isinstance(step, Loop):
            inner = list(_numbered(step.body, number))
            yield from inner
            number += len(inner)


Kind = Callable[[Program], Iterator[tuple[str, Edits]]]


def _of_one(change: Callable[[Instruction], Changed]) -> Kind:
    """A mutation of one instruction."""

    def everywhere(program: Program) -> Iterator[tuple[str, Edits]]:
        for number, step, _ in _numbered(program.body):
            if isinstance(step, Instruction):
                for what, changed in change(step):
                    if changed != step:
                        yield f"step {number}, {step.name} of {step.engine}: {what}", {number: (changed,)}

    return everywhere


def _of_place(change: Callable[[Place], Iterator[tuple[str, Place]]]) -> Kind:
    """A mutation of one operand of an instruction."""

    def change_one(instruction: Instruction) -> Changed:
        for name, place in instruction.places.items():
            for what, changed in change(place):
                yield f"{name} {what}", having(instruction, {name: changed})
            if isinstance(place, Far) and place.rows:
                for what, rows in change(place.rows):
                    assert isinstance(rows, Tile)
                    yield f"rows of {name} {what}", having(instruction, {name: replace(place, rows=rows)})

    return _of_one(change_one)


# Programs


def _without(program: Program) -> Iterator[tuple[str, Edits]]:
    for number, step, beside in _numbered(program.body):
        if isinstance(step, Instruction) and len(beside) > 1:
            yield f"step {number}, {step.name} of {step.engine}, is missing", {number: ()}


def _shortened(program: Program) -> Iterator[tuple[str, Edits]]:
    for number, step, _ in _numbered(program.body):
        if isinstance(step, Loop) and step.count > 1:
            shorter = Loop(step.count - 1, step.body)
            yield f"step {number}, a loop of {step.count} turns, makes one less", {number: (shorter,)}


def _neighbours(program: Program) -> Iterator[tuple[int, Instruction, int, Instruction]]:
    """Two consecutive instructions of an engine in one body."""
    last: dict[tuple[int, Engine], tuple[int, Instruction]] = {}
    for number, step, beside in _numbered(program.body):
        if isinstance(step, Instruction):
            before = last.get((id(beside), step.engine))
            if before is not None:
                yield *before, number, step
            last[id(beside), step.engine] = number, step


def _exchanged(program: Program) -> Iterator[tuple[str, Edits]]:
    for first, value, second, other in _neighbours(program):
        yield f"steps {first} and {second} of {value.engine} change places", {first: (other,), second: (value,)}


def _crossed(program: Program) -> Iterator[tuple[str, Edits]]:
    for first, value, second, other in _neighbours(program):
        for name in sorted(value.places.keys() & other.places.keys()) if type(value) is type(other) else ():
            a, b = (having(x, {name: y.places[name]}) for x, y in ((value, other), (other, value)))
            if a != value:
                yield f"steps {first} and {second}, {value.name}, have each other's {name}", {first: (a,), second: (b,)}


WAITS = ("a wait is missing", "a wait asks for one less")
KINDS: Mapping[str, Kind] = {
    WAITS[0]: _of_one(alter.dropped),
    WAITS[1]: _of_one(alter.lowered),
    "another partition": _of_place(alter.lanes),
    "a shifted place on the chip": _of_place(alter.on_chip),
    "a shifted place in HBM": _of_place(alter.in_hbm),
    "another bank": _of_place(alter.bank),
    "another coefficient of a loop": _of_place(alter.coefficient),
    "other turns": _of_place(alter.turn),
    "another type": _of_place(alter.dtype),
    "another size or stride": _of_place(alter.axis),
    "a narrower instruction": _of_one(alter.narrower),
    "operands swapped": _of_one(alter.swapped),
    "operands of two instructions swapped": _crossed,
    "begins or adds": _of_one(alter.accumulate),
    "another function or operator": _of_one(alter.operator),
    "another number": _of_one(alter.number),
    "another queue": _of_one(alter.queue),
    "an instruction is missing": _without,
    "two instructions in the other order": _exchanged,
    "a shortened loop": _shortened,
}
# With new waits it would be the same program in another order.
ONLY_DAMAGED = (*WAITS, "another queue", "two instructions in the other order")
