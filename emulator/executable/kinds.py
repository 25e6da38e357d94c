"""How each kind of instruction is spelled: its name, its fields, and the form of each, as its record declares them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final, get_type_hints

from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Alu, Instruction
from nxpipe.emulator.isa.instruction_set import INSTRUCTIONS
from nxpipe.emulator.isa.operands import Far, Place, Tile
from nxpipe.emulator.isa.program import Step
from nxpipe.emulator.isa.scalar import Function

LOOP: Final = "loop"
MOST_LOOPS: Final = 16
MOST_TERMS: Final = 16
MOST_TURNS: Final = 8
MOST_AXES: Final = 8
MOST_WAITS: Final = 32
MOST_TERMS_OF_WAITS: Final = 1 << 22  # in a file a wait takes two bytes, however deep the loops around it
MOST_STEPS: Final = 1 << 20
MOST_CARRIED_OUT: Final = 1 << 40

_FORMS: Final[Mapping[Any, str]] = {
    Affine: "affine",
    Tile: "tile",
    Far: "far",
    Place: "place",
    Alu: "alu",
    Function: "function",
    bool: "flag",
    float: "real",
    int: "whole",
    tuple[int, ...]: "wholes",
    Tile | None: "tile?",
    Alu | None: "alu?",
    float | Tile: "real|tile",
}
_COMMON: Final = {field.name for field in fields(Instruction)}


@dataclass(frozen=True)
class Kind:
    """`text` is how a file names it: an instruction that gets another field is another kind."""

    record: type[Instruction]
    fields: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return " ".join([self.record.name, *(f"{name}:{form}" for name, form in self.fields)])


def kind_of(record: type[Instruction]) -> Kind:
    return _by_name()[record.name]


@cache
def kinds() -> Mapping[str, Kind]:
    """By what a file names them."""
    return {kind.text: kind for kind in _by_name().values()}


@cache
def _by_name() -> Mapping[str, Kind]:
    return {name: _declared(record) for name, record in INSTRUCTIONS.items()}


def _declared(record: type[Instruction]) -> Kind:
    hints = get_type_hints(record)
    own = (field.name for field in fields(record) if field.name not in _COMMON)
    return Kind(record, tuple((name, _FORMS[hints[name]]) for name in own))


def kind_text(step: Step) -> str:
    return kind_of(type(step)).text if isinstance(step, Instruction) else LOOP
