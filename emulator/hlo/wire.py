"""Wire format of protobuf: a message as a list of numbered fields, read one level at a time and written in order.

It knows no schema and needs no protobuf package. The input is untrusted: depth, size and number of fields are limited,
and each defect is one `HloInvalid` that names its place by field numbers. A field that holds a message stays a view of
the input until it is opened, and is written from that view: a literal of 100 MB is copied once, into the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from nxpipe.emulator.errors import HloInvalid

MAX_BYTES: Final = (1 << 31) - 1  # protobuf's own limit of a message
MAX_DEPTH: Final = 32
MAX_FIELDS: Final = 16_000_000  # of all opened messages: each takes about 100 bytes, however short it is in the input

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_NUMBER: Final = (1 << 29) - 1
_COPIED: Final = 4096  # a message of at most so many bytes is copied: bytes are quicker to read than a view of them
_OVERLONG: Final = "it ends after its message"
_BY_NUMBER: Final = itemgetter(0)


class Fixed(NamedTuple):
    """A value of four or eight bytes, such as a float."""

    data: bytes


Value: TypeAlias = "int | bytes | memoryview | Fixed | Message"


class _Budget:
    """Fields that may still be read from one input."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class Message:
    """The fields of one message in the order of the input, as pairs of number and value.

    A message that `message` or `messages` has opened is part of its parent: changes to it are written. A singular field
    that occurs twice is refused, since readers differ in which value counts.
    """

    __slots__ = ("_budget", "fields", "path")

    def __init__(
        self, fields: list[tuple[int, Value]] | None = None, path: tuple[int, ...] = (), budget: _Budget | None = None
    ) -> None:
        self.fields = [] if fields is None else fields
        self.path = path
        self._budget = budget or _Budget(MAX_FIELDS)

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Message:
        """The outermost message of an input, which must not change while the message is used."""
        view = memoryview(data).cast("B")
        if len(view) > MAX_BYTES:
            raise HloInvalid((), f"it has {len(view):,} bytes, and protobuf permits {MAX_BYTES:,}")
        budget = _Budget(MAX_FIELDS)
        return cls(_fields(view, (), budget), (), budget)

    def has(self, number: int) -> bool:
        return number in {field for field, _ in self.fields}

    def number(self, number: int, default: int = 0) -> int:
        """A singular integer, as int64."""
        value = self._one(number)
        if value is None:
            return default
        if not isinstance(value, int):
            raise HloInvalid((*self.path, number), "it is no integer")
        return value - (1 << 64) if value >> 63 else value

    def numbers(self, number: int) -> list[int]:
        """A repeated integer, as int64; packed or not."""
        found: list[int] = []
        for field, value in self.fields:
            if field == number:
                if isinstance(value, int):
                    found.append(value)
                elif isinstance(value, (bytes, memoryview)):
                    found += _packed(value, (*self.path, number), self._budget)
                else:
                    raise HloInvalid((*self.path, number), "it is no list of integers")
        return [value - (1 << 64) if value >> 63 else value for value in found]

    def data(self, number: int) -> memoryview:
        """A singular field of bytes; empty if it is absent."""
        value = self._one(number)
        if value is None:
            return memoryview(b"")
        if not isinstance(value, (bytes, memoryview)):
            raise HloInvalid((*self.path, number), "it holds no bytes")
        return memoryview(value)

    def text(self, number: int) -> str:
        try:
            return str(self.data(number), "utf-8")
        except UnicodeDecodeError as error:
            raise HloInvalid((*self.path, number), "it is no UTF-8 text") from error

    def message(self, number: int) -> Message | None:
        """A singular message, opened."""
        found = self.messages(number)
        if len(found) > 1:
            raise HloInvalid((*self.path, number), "it occurs twice")
        return found[0] if found else None

    def messages(self, number: int) -> list[Message]:
        """A repeated message, each opened."""
        found = []
        for index, (field, value) in enumerate(self.fields):
            if field == number:
                opened = value if isinstance(value, Message) else self._open(number, value)
                self.fields[index] = (number, opened)
                found.append(opened)
        return found

    def add(self, number: int, value: Value | str) -> None:
        encoded = value.encode() if isinstance(value, str) else value
        self.fields.append((number, encoded & (1 << 64) - 1 if isinstance(encoded, int) else encoded))

    def set(self, number: int, value: Value | str) -> None:
        """Replace all values of a field by one."""
        self.remove(number)
        self.add(number, value)

    def set_numbers(self, number: int, values: Iterable[int]) -> None:
        """Replace a repeated integer, packed; without values the field is absent."""
        packed = b"".join([_encoded(value & (1 << 64) - 1) for value in values])
        self.remove(number)
        if packed:
            self.add(number, packed)

    def remove(self, *numbers: int) -> None:
        self.fields = [field for field in self.fields if field[0] not in numbers]

    def encode(self) -> bytes:
        """The bytes, with the fields in the order of their numbers and each varint as short as can be."""
        chunks: list[bytes | memoryview] = []
        size = self._write(chunks)
        if size > MAX_BYTES:
            raise HloInvalid((), f"it would have {size:,} bytes, and protobuf permits {MAX_BYTES:,}")
        return b"".join(chunks)

    def _one(self, number: int) -> Value | None:
        found: Value | None = None
        for field, value in self.fields:
            if field == number:
                if found is not None:
                    raise HloInvalid((*self.path, number), "it occurs twice")
                found = value
        return found

    def _open(self, number: int, value: Value) -> Message:
        path = (*self.path, number)
        if not isinstance(value, (bytes, memoryview)):
            raise HloInvalid(path, "it is no message")
        if len(path) > MAX_DEPTH:
            raise HloInvalid(path, f"messages are nested more than {MAX_DEPTH} deep")
        return Message(_fields(memoryview(value), path, self._budget), path, self._budget)

    def _write(self, chunks: list[bytes | memoryview]) -> int:
        self.fields.sort(key=_BY_NUMBER)  # stable: the values of a repeated field keep their order
        size = 0
        for number, value in self.fields:
            if isinstance(value, int):
                parts: Sequence[bytes | memoryview] = (_encoded(number << 3 | _VARINT) + _encoded(value),)
            elif isinstance(value, Message):
                inner: list[bytes | memoryview] = []
                parts = (_encoded(number << 3 | _BYTES) + _encoded(value._write(inner)), *inner)
            elif isinstance(value, Fixed):
                kind = _FIXED32 if len(value.data) == 4 else _FIXED64
                parts = (_encoded(number << 3 | kind), value.data)
            else:
                parts = (_encoded(number << 3 | _BYTES) + _encoded(len(value)), value)
            chunks += parts
            size += sum(map(len, parts))
        return size


def _fields(view: memoryview, path: tuple[int, ...], budget: _Budget) -> list[tuple[int, Value]]:
    """One level of a message. The loop counts to the budget, so that no short message can exceed it."""
    found: list[tuple[int, Value]] = []
    at, end = 0, len(view)
    data = view if end > _COPIED else bytes(view)
    number = 0
    try:
        for _ in range(budget.left):
            if at == end:
                break
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _varint(data, at - 1, path)
            number = tag >> 3
            kind = tag & 7
            if kind in (_BYTES, _VARINT):
                size = data[at]
                at += 1
                if size > 127:
                    size, at = _varint(data, at - 1, path)
                if kind == _VARINT:
                    found.append((number, size))
                else:
                    found.append((number, data[at : at + size]))
                    at += size
            else:
                fixed = _fixed(data, at, kind, (*path, number))
                found.append((number, fixed))
                at += len(fixed.data)
            if at > end or not 0 < number <= _MAX_NUMBER:
                raise HloInvalid((*path, number), _OVERLONG if at > end else "no field has that number")
        else:
            if at < end:
                raise HloInvalid(path, f"the module has more than {MAX_FIELDS:,} fields")
    except IndexError:
        raise HloInvalid((*path, number), "the message is truncated") from None
    budget.left -= len(found)
    return found


def _varint(view: bytes | memoryview, at: int, path: tuple[int, ...]) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise HloInvalid(path, "an integer has more than ten bytes")
    if value >> 64:
        raise HloInvalid(path, "an integer has more than 64 bits")
    return value, at


def _fixed(view: bytes | memoryview, at: int, kind: int, path: tuple[int, ...]) -> Fixed:
    if kind not in (_FIXED32, _FIXED64):
        raise HloInvalid(path, f"wire type {kind} is none of those in use")
    size = 4 if kind == _FIXED32 else 8
    if at + size > len(view):
        raise HloInvalid(path, _OVERLONG)
    return Fixed(bytes(view[at : at + size]))


def _packed(view: bytes | memoryview, path: tuple[int, ...], budget: _Budget) -> list[int]:
    found = []
    at, end = 0, len(view)
    if end == 1 and view[0] < 128:
        return [view[0]]
    if end > budget.left:  # an integer has at least one byte
        raise HloInvalid(path, f"the module has more than {MAX_FIELDS:,} fields")
    try:
        while at < end:
            value, at = (view[at], at + 1) if view[at] < 128 else _varint(view, at, path)
            found.append(value)
    except IndexError:
        raise HloInvalid(path, "its last integer is truncated") from None
    budget.left -= len(found)
    return found


def _encoded(value: int) -> bytes:
    if value < 128:
        return _SHORT[value]
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


_SHORT: Final = [bytes([value]) for value in range(128)]
