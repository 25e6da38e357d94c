"""What can be wrong with a program, in a form that a person, a test and a report can use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nxpipe.emulator.errors import CompileError


class Rule(StrEnum):
    """The rows of the table of rules in docs/isa.md."""

    PARTITION = "partition"
    START = "start"
    AXES = "axes"
    SIZE = "size"
    BOUNDS = "bounds"
    ALIGNMENT = "alignment"
    BANK = "bank"
    DTYPE = "dtype"
    ENGINE = "engine"
    MEMORY = "memory"
    SHAPE = "shape"
    OPERATOR = "operator"
    VALUE = "value"
    GENERATION = "generation"
    LOOP = "loop"
    WAIT = "wait"
    BUFFER = "buffer"


@dataclass(frozen=True)
class Broken:
    """A rule that something breaks: what is so, with its numbers, and the way out."""

    rule: Rule
    what: str
    way_out: str


@dataclass(frozen=True)
class Fault:
    """`number` counts instructions as they stand in the text, from 0; it is None where the fault is not one's own."""

    broken: Broken
    number: int | None = None
    instruction: str = ""
    note: str = ""

    @property
    def rule(self) -> Rule:
        return self.broken.rule

    def __str__(self) -> str:
        where = "" if self.number is None else f"instruction {self.number} ({self.instruction}): "
        place = f", at {self.note if self.note.isprintable() else repr(self.note)}" if self.note else ""
        return f"{where}{self.broken.what}{place}; {self.broken.way_out}"


class ProgramInvalid(CompileError):
    """A program that no core would carry out as it stands."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"the program is not legal{more}: {faults[0]}")


Breaches = Iterator[Broken]
