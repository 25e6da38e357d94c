"""Encoding of instructions: every record of the instruction set by its name, every field by the codec of its type."""

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
MOST_TERMS_OF_WAITS: Final = 1 << 22  # a wait takes two bytes in a file, regardless of the nesting of loops
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
    """An instruction class and the codecs of its fields; `text` is its name in a file."""

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
    encoder = _Encoder()
    if counted(body).total() > MOST_EXECUTED:
        raise encoder.out.fault(f"a program executes more than {MOST_EXECUTED} instructions")
    encoder.body(body)
    return bytes(encoder.out.data)


class _Encoder:
    """Writes the body of a program; shared values are written once."""

    def __init__(self) -> None:
        self.out = Writer()
        self._progress = Progress()
        self._note = self._steps = self._terms = 0
        self._words, self._affines, self._axes, self._places, self._reals = (SharedWriter(self.out) for _ in range(5))
        # By object identity: safe, because the program keeps its objects alive; fast, because it shares most of them.
        self._encoded: dict[int, bytes] = {}
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
        per_iteration = counted(loop.body)
        self._require(self._progress.loops < MOST_LOOPS, f"more than {MOST_LOOPS} loops are nested")
        self._require(loop.count > 0, f"a loop runs {loop.count} times")
        self.out.number(loop.count)
        self.out.number(len(per_iteration))
        for engine in sorted(per_iteration):
            self._words.text(engine)
            self.out.number(per_iteration[engine])
        self._progress.enter(loop.count, per_iteration)
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
        self._put_affine(_encode_affine(wait.done + self._progress.done(wait.engine) * -1))

    def _field(self, form: str, value: Any) -> None:
        if form.endswith("?"):
            self.out.flag(value is not None)
            if value is None:
                return
        self._forms[form.removesuffix("?")](value)

    def _affine(self, value: Affine) -> None:
        self._put_affine(self._encode(value, _encode_affine))

    def _put_affine(self, encoded: bytes) -> None:
        self._affines.put(encoded, lambda: self._raw(encoded))

    def _axes_of(self, place: Place) -> None:
        encoded = self._encode(place.axes, _encode_axes)
        self._axes.put(encoded, lambda: self._raw(encoded))

    def _place(self, place: Place) -> None:
        self._places.put(self._encode(place, self._encode_place), lambda: self._new_place(place))

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
        encoded = Writer()
        encoded.real(value)
        self._reals.put(bytes(encoded.data), lambda: self._raw(encoded.data))

    def _real_or_tile(self, value: float | Tile) -> None:
        self.out.flag(isinstance(value, Tile))
        self._forms["tile" if isinstance(value, Tile) else "real"](value)

    def _wholes(self, values: Sequence[int]) -> None:
        self._count(len(values), MOST_AXES, "steps")
        for value in values:
            self.out.signed(value)

    def _raw(self, encoded: bytes | bytearray) -> None:
        self.out.data += encoded

    def _count(self, count: int, most: int, what: str) -> None:
        self._require(count <= most, f"there are {count} {what}, and {most} are allowed")
        self.out.number(count)

    def _require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise self.out.fault(reason)

    # Encoded forms, which identify shared values

    def _encode(self, value: Any, encode: Callable[[Any], bytes]) -> bytes:
        known = self._encoded.get(id(value))
        if known is None:
            known = self._encoded[id(value)] = encode(value)
        return known

    def _encode_place(self, place: Place) -> bytes:
        encoded = Writer()
        encoded.flag(isinstance(place, Tile))
        encoded.data += self._encode(place.offset, _encode_affine)
        encoded.data += self._encode(place.axes, _encode_axes)
        encoded.text(place.dtype)
        if isinstance(place, Tile):
            encoded.text(place.memory)
            encoded.number(place.start)
            encoded.number(place.partitions)
        else:
            encoded.number(place.buffer)
            encoded.data += b"" if place.rows is None else self._encode_place(place.rows)
        return bytes(encoded.data)


def _encode_affine(value: Affine) -> bytes:
    out = Writer()
    _encode_sum(out, value)
    if len(value.rotations) > MOST_ROTATIONS:
        raise out.fault(
            f"an affine expression has {len(value.rotations)} rotating offsets, and {MOST_ROTATIONS} are allowed"
        )
    out.number(len(value.rotations))
    for rotation in value.rotations:
        if not rotation.step or rotation.count < 2 or rotation.of.rotations:
            raise out.fault(f"{rotation} has no step or fewer than 2 buffers, or is nested")
        out.signed(rotation.step)
        out.number(rotation.count)
        _encode_sum(out, rotation.of)
    return bytes(out.data)


def _encode_sum(out: Writer, value: Affine) -> None:
    if len(value.terms) > MOST_TERMS:
        raise out.fault(f"an affine expression has {len(value.terms)} terms, and {MOST_TERMS} are allowed")
    out.signed(value.base)
    out.number(len(value.terms))
    before = -1
    for depth, coefficient in value.terms:
        if not coefficient or depth <= before:
            raise out.fault(f"the terms {value.terms} do not ascend, or a coefficient is 0")
        out.number(depth - before - 1)
        out.signed(coefficient)
        before = depth


def _encode_axes(axes: Sequence[Axis]) -> bytes:
    out = Writer()
    if len(axes) > MOST_AXES:
        raise out.fault(f"an operand has {len(axes)} axes, and {MOST_AXES} are allowed")
    out.number(len(axes))
    for axis in axes:
        out.number(axis.size)
        out.signed(axis.stride)
    return bytes(out.data)


def read_code(source: Reader, buffers: int, notes: int) -> tuple[Step, ...]:
    """The body of a program with `buffers` buffers and `notes` notes."""
    body, counts = _Decoder(source, buffers, notes).body()
    if counts.total() > MOST_EXECUTED:
        raise source.fault(f"the program executes more than {MOST_EXECUTED} instructions")
    source.end()
    return body


class _Decoder:
    """Reads the body of a program from untrusted bytes."""

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
                loop, per_iteration = self._loop()
                counts.update({engine: loop.count * number for engine, number in per_iteration.items()})
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
        per_iteration = {self._words.word(Engine): self._source.number() for _ in range(engines)}
        self._require(count > 0, "a loop has the count 0")
        self._progress.enter(count, per_iteration)
        body, counts = self.body()
        self._progress.leave()
        self._require(counts == per_iteration, "the instruction counts of a loop are not those of its body")
        return Loop(count, body), counts

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
        """Check the loop depth: a shared value may have been defined inside more loops than enclose this use."""
        if value.depth > self._progress.loops:
            raise self._source.fault(f"an affine expression uses {value.depth} loops inside {self._progress.loops}")

    def _new_affine(self) -> Affine:
        base, terms = self._sum()
        rotations = tuple(self._rotation() for _ in range(self._source.count("turns", MOST_ROTATIONS)))
        return Affine(base, terms, rotations)

    def _rotation(self) -> RotatingOffset:
        step, count = self._source.signed(), self._source.number()
        self._require(step != 0 and count > 1, f"a rotating offset has {count} buffers and step {step}")
        return RotatingOffset(step, count, Affine(*self._sum()))

    def _sum(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        base = self._source.signed()
        terms: list[tuple[int, int]] = []
        depth = -1
        for _ in range(self._source.count("terms", MOST_TERMS)):
            depth += 1 + self._source.number()
            coefficient = self._source.signed()
            self._require(coefficient != 0 and depth < MOST_LOOPS, "a term is 0, or its loop is nested too deep")
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
            raise self._source.fault("an operand is in HBM, where a tile is required")
        return place

    def _far(self) -> Far:
        place = self._place()
        if not isinstance(place, Far):
            raise self._source.fault("an operand is a tile, where HBM is required")
        return place

    def _new_place(self, inside: bool = False) -> Place:
        memory = self._words.text()
        dtype = self._words.word(DType)
        offset, axes = self._affine(), self._axes.get(self._new_axes)
        if memory != "hbm":
            self._require(memory in list(Memory), f"there is no memory {memory[:40]!r}")
            return Tile(Memory(memory), dtype, self._source.number(), self._source.number(), offset, axes)
        self._require(not inside, "row numbers are in HBM, not in a tile")
        buffer = self._source.number()
        self._require(buffer < self._buffers, f"there is no buffer {buffer} among {self._buffers}")
        return Far(buffer, dtype, offset, axes, self._rows() if self._source.flag() else None)

    def _rows(self) -> Tile:
        place = self._places.get(lambda: self._new_place(inside=True))
        if not isinstance(place, Tile):
            raise self._source.fault("row numbers are in HBM, not in a tile")
        self._require_loops(place.offset)
        return place

    def _new_axes(self) -> tuple[Axis, ...]:
        count = self._source.count("axes", MOST_AXES)
        return tuple(Axis(self._source.number(), self._source.signed()) for _ in range(count))

    def _real(self) -> float:
        return self._reals.get(self._source.real)

    def _wholes(self) -> tuple[int, ...]:
        return tuple(self._source.signed() for _ in range(self._source.count("steps", MOST_AXES)))

    def _require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise self._source.fault(reason)
