"""The code section, written."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nxpipe.emulator.executable.kinds import (
    MOST_AXES,
    MOST_CARRIED_OUT,
    MOST_LOOPS,
    MOST_STEPS,
    MOST_TERMS,
    MOST_TERMS_OF_WAITS,
    MOST_TURNS,
    MOST_WAITS,
    kind_of,
    kind_text,
)
from nxpipe.emulator.executable.shared import SharedWriter
from nxpipe.emulator.executable.spelling import Writer
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Place, Tile
from nxpipe.emulator.isa.program import Loop, Progress, Step, counted


def write_code(body: Sequence[Step]) -> bytes:
    writing = _Writing()
    if counted(body).total() > MOST_CARRIED_OUT:
        raise writing.out.fault(f"a program carries out more than {MOST_CARRIED_OUT} instructions")
    writing.body(body)
    return bytes(writing.out.data)


class _Writing:
    def __init__(self) -> None:
        self.out = Writer()
        self._progress = Progress()
        self._note = self._steps = self._terms = 0
        self._words, self._affines, self._axes, self._places, self._reals = (SharedWriter(self.out) for _ in range(5))
        # By identity: objects live as long as the program, which shares most of them.
        self._spelled: dict[int, bytes] = {}
        self._forms: Mapping[str, Callable[[Any], None]] = {
            "affine": self._affine,
            "tile": self._place,
            "far": self._place,
            "place": self._place,
            "alu": self._words.text,
            "function": self._words.text,
            "flag": self.out.flag,
            "real": self._real,
            "whole": self.out.signed,
            "wholes": self._wholes,
            "real|tile": self._real_or_tile,
        }

    def body(self, steps: Sequence[Step]) -> None:
        self._steps += len(steps)
        self._require(self._steps <= MOST_STEPS, "a program has too many steps")
        self.out.number(len(steps))
        for step in steps:
            self._words.text(kind_text(step))
            if isinstance(step, Loop):
                self._loop(step)
            else:
                self._instruction(step)

    def _loop(self, loop: Loop) -> None:
        each = counted(loop.body)
        self._require(self._progress.loops < MOST_LOOPS, f"more than {MOST_LOOPS} loops are around each other")
        self._require(loop.count > 0, f"a loop runs {loop.count} times")
        self.out.number(loop.count)
        self.out.number(len(each))
        for engine in sorted(each):
            self._words.text(engine)
            self.out.number(each[engine])
        self._progress.enter(loop.count, each)
        self.body(loop.body)
        self._progress.leave()

    def _instruction(self, instruction: Instruction) -> None:
        self._words.text(instruction.engine)
        self.out.signed(instruction.note - self._note)
        self._note = instruction.note
        self._count(len(instruction.waits), MOST_WAITS, "waits")
        for wait in instruction.waits:
            self._wait(wait)
        for name, form in kind_of(type(instruction)).fields:
            self._field(form, getattr(instruction, name))
        self._progress.step(instruction.engine)

    def _wait(self, wait: Wait) -> None:
        self._terms += len(wait.done.terms)
        self._require(self._terms <= MOST_TERMS_OF_WAITS, "the waits of a program have too many terms")
        self._words.text(wait.engine)
        self._put_affine(_spell_affine(wait.done + self._progress.done(wait.engine) * -1))

    def _field(self, form: str, value: Any) -> None:
        if form.endswith("?"):
            self.out.flag(value is not None)
            if value is None:
                return
        self._forms[form.removesuffix("?")](value)

    def _affine(self, value: Affine) -> None:
        self._put_affine(self._spell(value, _spell_affine))

    def _put_affine(self, spelled: bytes) -> None:
        self._affines.put(spelled, lambda: self._raw(spelled))

    def _axes_of(self, place: Place) -> None:
        spelled = self._spell(place.axes, _spell_axes)
        self._axes.put(spelled, lambda: self._raw(spelled))

    def _place(self, place: Place) -> None:
        self._places.put(self._spell(place, self._spell_place), lambda: self._new_place(place))

    def _new_place(self, place: Place) -> None:
        self._words.text(place.memory if isinstance(place, Tile) else "hbm")
        self._words.text(place.dtype)
        self._affine(place.offset)
        self._axes_of(place)
        if isinstance(place, Tile):
            self.out.number(place.start)
            self.out.number(place.partitions)
        else:
            self.out.number(place.buffer)
            self._field("tile?", place.rows)

    def _real(self, value: float) -> None:
        spelled = Writer()
        spelled.real(value)
        self._reals.put(bytes(spelled.data), lambda: self._raw(spelled.data))

    def _real_or_tile(self, value: float | Tile) -> None:
        self.out.flag(isinstance(value, Tile))
        self._forms["tile" if isinstance(value, Tile) else "real"](value)

    def _wholes(self, values: Sequence[int]) -> None:
        self._count(len(values), MOST_AXES, "steps")
        for value in values:
            self.out.signed(value)

    def _raw(self, spelled: bytes | bytearray) -> None:
        self.out.data += spelled

    def _count(self, count: int, most: int, what: str) -> None:
        self._require(count <= most, f"there are {count} {what}, and {most} are allowed")
        self.out.number(count)

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise self.out.fault(otherwise)

    # What a value is known by

    def _spell(self, value: Any, spell: Callable[[Any], bytes]) -> bytes:
        known = self._spelled.get(id(value))
        if known is None:
            known = self._spelled[id(value)] = spell(value)
        return known

    def _spell_place(self, place: Place) -> bytes:
        spelled = Writer()
        spelled.flag(isinstance(place, Tile))
        spelled.data += self._spell(place.offset, _spell_affine)
        spelled.data += self._spell(place.axes, _spell_axes)
        spelled.text(place.dtype)
        if isinstance(place, Tile):
            spelled.text(place.memory)
            spelled.number(place.start)
            spelled.number(place.partitions)
        else:
            spelled.number(place.buffer)
            spelled.data += b"" if place.rows is None else self._spell_place(place.rows)
        return bytes(spelled.data)


def _spell_affine(value: Affine) -> bytes:
    out = Writer()
    _spell_sum(out, value)
    if len(value.turns) > MOST_TURNS:
        raise out.fault(f"an affine number has {len(value.turns)} turns, and {MOST_TURNS} are allowed")
    out.number(len(value.turns))
    for turn in value.turns:
        if not turn.step or turn.count < 2 or turn.of.turns:
            raise out.fault(f"{turn} does not turn, or turns inside a turn")
        out.signed(turn.step)
        out.number(turn.count)
        _spell_sum(out, turn.of)
    return bytes(out.data)


def _spell_sum(out: Writer, value: Affine) -> None:
    if len(value.terms) > MOST_TERMS:
        raise out.fault(f"an affine number has {len(value.terms)} terms, and {MOST_TERMS} are allowed")
    out.signed(value.base)
    out.number(len(value.terms))
    before = -1
    for depth, coefficient in value.terms:
        if not coefficient or depth <= before:
            raise out.fault(f"the terms {value.terms} do not ascend, or one is 0")
        out.number(depth - before - 1)
        out.signed(coefficient)
        before = depth


def _spell_axes(axes: Sequence[Axis]) -> bytes:
    out = Writer()
    if len(axes) > MOST_AXES:
        raise out.fault(f"a place has {len(axes)} axes, and {MOST_AXES} are allowed")
    out.number(len(axes))
    for axis in axes:
        out.number(axis.size)
        out.signed(axis.stride)
    return bytes(out.data)
