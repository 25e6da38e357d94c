"""The code section, read. Nothing that it says is believed before it has been checked."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from nxpipe.emulator.executable.kinds import (
    LOOP,
    MOST_AXES,
    MOST_CARRIED_OUT,
    MOST_LOOPS,
    MOST_STEPS,
    MOST_TERMS,
    MOST_TERMS_OF_WAITS,
    MOST_TURNS,
    MOST_WAITS,
    Kind,
    kinds,
)
from nxpipe.emulator.executable.shared import SharedReader, WordReader
from nxpipe.emulator.executable.spelling import Reader
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile
from nxpipe.emulator.isa.program import Loop, Progress, Step
from nxpipe.emulator.isa.scalar import Function


def read_code(source: Reader, buffers: int, notes: int) -> tuple[Step, ...]:
    """The body of a program with so many buffers and notes."""
    body, counts = _Reading(source, buffers, notes).body()
    if counts.total() > MOST_CARRIED_OUT:
        raise source.fault(f"the program carries out more than {MOST_CARRIED_OUT} instructions")
    source.end()
    return body


class _Reading:
    def __init__(self, source: Reader, buffers: int, notes: int) -> None:
        self._source = source
        self._buffers = buffers
        self._notes = notes
        self._progress = Progress()
        self._note = self._steps = self._terms = 0
        self._words = WordReader(source)
        self._affines: SharedReader[Affine] = SharedReader(source)
        self._axes: SharedReader[tuple[Axis, ...]] = SharedReader(source)
        self._places: SharedReader[Place] = SharedReader(source)
        self._reals: SharedReader[float] = SharedReader(source)
        self._forms: Mapping[str, Callable[[], Any]] = {
            "affine": self._affine,
            "tile": self._tile,
            "far": self._far,
            "place": self._place,
            "alu": lambda: self._words.word(Alu),
            "function": lambda: self._words.word(Function),
            "flag": source.flag,
            "real": self._real,
            "whole": source.signed,
            "wholes": self._wholes,
            "real|tile": lambda: self._tile() if source.flag() else self._real(),
        }

    def body(self) -> tuple[tuple[Step, ...], Counter[Engine]]:
        """The steps, and how many instructions each engine carries out in them."""
        steps: list[Step] = []
        counts: Counter[Engine] = Counter()
        count = self._source.count("steps")
        self._steps += count
        self._require(self._steps <= MOST_STEPS, "the program has too many steps")
        for _ in range(count):
            text = self._words.text()
            if text == LOOP:
                loop, each = self._loop()
                counts.update({engine: loop.count * number for engine, number in each.items()})
                steps.append(loop)
            else:
                instruction = self._instruction(self._kind(text))
                counts[instruction.engine] += 1
                steps.append(instruction)
        return tuple(steps), counts

    def _kind(self, text: str) -> Kind:
        kind = kinds().get(text)
        if kind is None:
            raise self._source.fault(f"this reader knows no instruction {text[:120]!r}; build the program anew")
        return kind

    def _loop(self) -> tuple[Loop, Counter[Engine]]:
        self._require(self._progress.loops < MOST_LOOPS, f"more than {MOST_LOOPS} loops are around each other")
        count = self._source.number()
        engines = self._source.count("engines", len(Engine))
        each = {self._words.word(Engine): self._source.number() for _ in range(engines)}
        self._require(count > 0, "a loop runs no times")
        self._progress.enter(count, each)
        body, found = self.body()
        self._progress.leave()
        self._require(found == each, "a loop does not carry out as many instructions as it says")
        return Loop(count, body), found

    def _instruction(self, kind: Kind) -> Instruction:
        engine = self._words.word(Engine)
        self._note += self._source.signed()
        if not 0 <= self._note < self._notes:
            raise self._source.fault(f"there is no note {self._note} among {self._notes}")
        waits = tuple(self._wait() for _ in range(self._source.count("waits", MOST_WAITS)))
        values = {name: self._field(form) for name, form in kind.fields}
        self._progress.step(engine)
        return kind.record(engine=engine, waits=waits, note=self._note, **values)

    def _wait(self) -> Wait:
        engine = self._words.word(Engine)
        done = self._affine() + self._progress.done(engine)
        self._terms += len(done.terms)
        self._require(self._terms <= MOST_TERMS_OF_WAITS, "the waits of the program have too many terms")
        return Wait(engine, done)

    def _field(self, form: str) -> Any:
        if form.endswith("?") and not self._source.flag():
            return None
        return self._forms[form.removesuffix("?")]()

    def _affine(self) -> Affine:
        value = self._affines.get(self._new_affine)
        self._require_loops(value)
        return value

    def _require_loops(self, value: Affine) -> None:
        """It may have been written inside of other loops."""
        if value.depth > self._progress.loops:
            raise self._source.fault(f"a number of {value.depth} loops stands inside of {self._progress.loops}")

    def _new_affine(self) -> Affine:
        base, terms = self._sum()
        turns = tuple(self._turn() for _ in range(self._source.count("turns", MOST_TURNS)))
        return Affine(base, terms, turns)

    def _turn(self) -> RotatingOffset:
        step, count = self._source.signed(), self._source.number()
        self._require(step != 0 and count > 1, f"a turn of {count} by {step} does not turn")
        return RotatingOffset(step, count, Affine(*self._sum()))

    def _sum(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        base = self._source.signed()
        terms: list[tuple[int, int]] = []
        depth = -1
        for _ in range(self._source.count("terms", MOST_TERMS)):
            depth += 1 + self._source.number()
            coefficient = self._source.signed()
            self._require(coefficient != 0 and depth < MOST_LOOPS, "a term is nothing, or of a loop too deep")
            terms.append((depth, coefficient))
        return base, tuple(terms)

    def _place(self) -> Place:
        place = self._places.get(self._new_place)
        self._require_loops(place.offset)
        if isinstance(place, Far) and place.rows is not None:
            self._require_loops(place.rows.offset)
        return place

    def _tile(self) -> Tile:
        place = self._place()
        if not isinstance(place, Tile):
            raise self._source.fault("a place in HBM stands where a tile belongs")
        return place

    def _far(self) -> Far:
        place = self._place()
        if not isinstance(place, Far):
            raise self._source.fault("a tile stands where a place in HBM belongs")
        return place

    def _new_place(self, inside: bool = False) -> Place:
        memory = self._words.text()
        dtype = self._words.word(DType)
        offset, axes = self._affine(), self._axes.get(self._new_axes)
        if memory != "hbm":
            self._require(memory in list(Memory), f"there is no memory {memory[:40]!r}")
            return Tile(Memory(memory), dtype, self._source.number(), self._source.number(), offset, axes)
        self._require(not inside, "row numbers of a place in HBM lie in HBM themselves")
        buffer = self._source.number()
        self._require(buffer < self._buffers, f"there is no buffer {buffer} among {self._buffers}")
        return Far(buffer, dtype, offset, axes, self._rows() if self._source.flag() else None)

    def _rows(self) -> Tile:
        place = self._places.get(lambda: self._new_place(inside=True))
        if not isinstance(place, Tile):
            raise self._source.fault("row numbers of a place in HBM lie in HBM themselves")
        self._require_loops(place.offset)
        return place

    def _new_axes(self) -> tuple[Axis, ...]:
        count = self._source.count("axes", MOST_AXES)
        return tuple(Axis(self._source.number(), self._source.signed()) for _ in range(count))

    def _real(self) -> float:
        return self._reals.get(self._source.real)

    def _wholes(self) -> tuple[int, ...]:
        return tuple(self._source.signed() for _ in range(self._source.count("steps", MOST_AXES)))

    def _require(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise self._source.fault(otherwise)
