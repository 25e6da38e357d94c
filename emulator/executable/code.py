"""Instructions as bytes: every record of the instruction set, by its name and the codec of each field."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType
from typing import Any, Final, get_type_hints

from nxpipe.emulator.executable.field_codecs import Reader, SharedReader, SharedWriter, WordReader, Writer
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa import collective, dma, gpsimd, scalar, tensor, vector
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile
from nxpipe.emulator.isa.program import Loop, Progress, Step, counted
from nxpipe.emulator.isa.scalar import Function


def _records(module: ModuleType) -> Iterator[type[Instruction]]:
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Instruction) and value.__module__ == module.__name__:
            yield value


INSTRUCTIONS: Final[Mapping[str, type[Instruction]]] = {
    record.name: record for module in (dma, tensor, scalar, vector, gpsimd, collective) for record in _records(module)
}


LOOP: Final = "loop"
MOST_LOOPS: Final = 16
MOST_TERMS: Final = 16
MOST_ROTATIONS: Final = 8
MOST_AXES: Final = 8
MOST_WAITS: Final = 32
MOST_TERMS_OF_WAITS: Final = 1 << 22  # a wait takes two bytes in a file, however deep the loops around it
MOST_STEPS: Final = 1 << 20
MOST_EXECUTED: Final = 1 << 40

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
    """A record and the forms of its fields; `text` is its name in a file."""

    record: type[Instruction]
    fields: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return " ".join([self.record.name, *(f"{name}:{form}" for name, form in self.fields)])


def kind_of(record: type[Instruction]) -> Kind:
    return _by_name()[record.name]


@cache
def kinds() -> Mapping[str, Kind]:
    """Kinds by their names in a file."""
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


def write_code(body: Sequence[Step]) -> bytes:
    writing = _Writing()
    if counted(body).total() > MOST_EXECUTED:
        raise writing.out.fault(f"a program executes more than {MOST_EXECUTED} instructions")
    writing.body(body)
    return bytes(writing.out.data)


class _Writing:
    def __init__(self) -> None:
        self.out = Writer()
        self._progress = Progress()
        self._note = self._steps = self._terms = 0
        self._words, self._affines, self._axes, self._places, self._reals = (SharedWriter(self.out) for _ in range(5))
        # By identity, which is safe as the program keeps its objects alive, and fast as it shares most of them.
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
        self._require(self._progress.loops < MOST_LOOPS, f"more than {MOST_LOOPS} loops are nested")
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

    # The bytes by which a shared value is recognised

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
    if len(value.turns) > MOST_ROTATIONS:
        raise out.fault(f"an affine number has {len(value.turns)} turns, and {MOST_ROTATIONS} are allowed")
    out.number(len(value.turns))
    for turn in value.turns:
        if not turn.step or turn.count < 2 or turn.of.turns:
            raise out.fault(f"{turn} has no step, fewer than 2 buffers, or is nested")
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


def read_code(source: Reader, buffers: int, notes: int) -> tuple[Step, ...]:
    """The body of a program with these numbers of buffers and notes."""
    body, counts = _Reading(source, buffers, notes).body()
    if counts.total() > MOST_EXECUTED:
        raise source.fault(f"the program executes more than {MOST_EXECUTED} instructions")
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
        """The steps, and the number of instructions that each engine executes in them."""
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
            raise self._source.fault(
                f"this reader does not support the instruction {text[:120]!r}; rebuild the program"
            )
        return kind

    def _loop(self) -> tuple[Loop, Counter[Engine]]:
        self._require(self._progress.loops < MOST_LOOPS, f"more than {MOST_LOOPS} loops are nested")
        count = self._source.number()
        engines = self._source.count("engines", len(Engine))
        each = {self._words.word(Engine): self._source.number() for _ in range(engines)}
        self._require(count > 0, "a loop runs no times")
        self._progress.enter(count, each)
        body, found = self.body()
        self._progress.leave()
        self._require(found == each, "the instruction counts of a loop are not those of its body")
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
        """A shared number may have been defined inside more loops than are here."""
        if value.depth > self._progress.loops:
            raise self._source.fault(f"a number uses {value.depth} loops inside of {self._progress.loops}")

    def _new_affine(self) -> Affine:
        base, terms = self._sum()
        turns = tuple(self._turn() for _ in range(self._source.count("turns", MOST_ROTATIONS)))
        return Affine(base, terms, turns)

    def _turn(self) -> RotatingOffset:
        step, count = self._source.signed(), self._source.number()
        self._require(step != 0 and count > 1, f"a rotating offset of {count} buffers with step {step}")
        return RotatingOffset(step, count, Affine(*self._sum()))

    def _sum(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        base = self._source.signed()
        terms: list[tuple[int, int]] = []
        depth = -1
        for _ in range(self._source.count("terms", MOST_TERMS)):
            depth += 1 + self._source.number()
            coefficient = self._source.signed()
            self._require(coefficient != 0 and depth < MOST_LOOPS, "a term is 0, or of a loop too deep")
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
            raise self._source.fault("a place in HBM is in the place of a tile")
        return place

    def _far(self) -> Far:
        place = self._place()
        if not isinstance(place, Far):
            raise self._source.fault("a tile is in the place of a place in HBM")
        return place

    def _new_place(self, inside: bool = False) -> Place:
        memory = self._words.text()
        dtype = self._words.word(DType)
        offset, axes = self._affine(), self._axes.get(self._new_axes)
        if memory != "hbm":
            self._require(memory in list(Memory), f"there is no memory {memory[:40]!r}")
            return Tile(Memory(memory), dtype, self._source.number(), self._source.number(), offset, axes)
        self._require(not inside, "the row numbers of a place in HBM are in HBM")
        buffer = self._source.number()
        self._require(buffer < self._buffers, f"there is no buffer {buffer} among {self._buffers}")
        return Far(buffer, dtype, offset, axes, self._rows() if self._source.flag() else None)

    def _rows(self) -> Tile:
        place = self._places.get(lambda: self._new_place(inside=True))
        if not isinstance(place, Tile):
            raise self._source.fault("the row numbers of a place in HBM are in HBM")
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
