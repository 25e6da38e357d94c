"""Codecs of the fields of an executable: numbers, texts and shared values.

Each value has exactly one encoding. A reader checks every length against the remaining bytes before it allocates
memory. A shared value is written once; later uses refer to it by the number of distinct values written since.
"""

import struct
from collections.abc import Callable
from enum import StrEnum
from typing import Final, Generic, TypeVar

from nxpipe.emulator.errors import ExecutableInvalid

LONGEST_TEXT: Final = 4096  # bytes
_REAL: Final = struct.Struct("<d")


class Writer:
    """Appends encoded fields to `data`."""

    def __init__(self) -> None:
        self.data = bytearray()

    def number(self, value: int) -> None:
        """Unsigned LEB128: seven bits in each byte, lowest first; the top bit is set if more bytes follow."""
        if not 0 <= value < 1 << 64:
            raise self.fault(f"{value} does not fit 64 bits")
        while value > 0x7F:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def signed(self, value: int) -> None:
        """Zigzag encoding: 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
        self.number(2 * value if value >= 0 else -2 * value - 1)

    def flag(self, value: bool) -> None:
        self.data.append(value)

    def real(self, value: float) -> None:
        self.data += _REAL.pack(value)

    def text(self, value: str) -> None:
        try:
            encoded = value.encode()
        except UnicodeEncodeError:
            raise self.fault(f"{value[:40]!r} is not valid Unicode") from None
        if len(encoded) > LONGEST_TEXT:
            raise self.fault(f"a text takes {len(encoded)} bytes, and {LONGEST_TEXT} are allowed")
        self.number(len(encoded))
        self.data += encoded

    def fault(self, reason: str) -> ExecutableInvalid:
        return ExecutableInvalid(len(self.data), reason)


class Reader:
    """Decodes the fields between two offsets of a file; raises ExecutableInvalid beyond the end."""

    def __init__(self, data: bytes, start: int, stop: int) -> None:
        self._data = data
        self._stop = stop
        self.at = start

    @property
    def left(self) -> int:
        return self._stop - self.at

    def number(self) -> int:
        byte = self.byte()
        return byte if byte <= 0x7F else self._longer(byte & 0x7F)

    def _longer(self, value: int) -> int:
        shift, more = 7, True
        while more:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            more = byte > 0x7F
            shift += 7
            if shift > 70 or not byte:
                raise self.fault("a number is encoded longer than necessary")
        if value >> 64:
            raise self.fault("a number does not fit 64 bits")
        return value

    def signed(self) -> int:
        number = self.number()
        return number >> 1 if number & 1 == 0 else -(number >> 1) - 1

    def byte(self) -> int:
        if self.at >= self._stop:
            raise self.fault("the section ends inside a field")
        byte = self._data[self.at]
        self.at += 1
        return byte

    def flag(self) -> bool:
        byte = self.byte()
        if byte > 1:
            raise self.fault(f"a flag is {byte}, neither 0 nor 1")
        return byte == 1

    def real(self) -> float:
        (value,) = _REAL.unpack(self.raw(_REAL.size))
        return float(value)

    def text(self) -> str:
        size = self.number()
        if size > LONGEST_TEXT:
            raise self.fault(f"a text has {size} bytes, and the limit is {LONGEST_TEXT}")
        try:
            return self.raw(size).decode()
        except UnicodeDecodeError:
            raise self.fault("a text is not UTF-8") from None

    def raw(self, size: int) -> bytes:
        if size > self.left:
            raise self.fault(f"{size} bytes should follow, and {self.left} are left")
        self.at += size
        return self._data[self.at - size : self.at]

    def count(self, what: str, most: int | None = None) -> int:
        """The number of entries that follow; at most the number of remaining bytes, because each takes at least one."""
        count = self.number()
        if count > self.left:
            raise self.fault(f"{count} {what} should follow in {self.left} bytes")
        if most is not None and count > most:
            raise self.fault(f"there are {count} {what}, and {most} are allowed")
        return count

    def end(self) -> None:
        if self.left:
            raise self.fault(f"{self.left} bytes remain at the end of the section")

    def fault(self, reason: str) -> ExecutableInvalid:
        return ExecutableInvalid(self.at, reason)


T = TypeVar("T")
Word = TypeVar("Word", bound=StrEnum)


class SharedWriter:
    """Writes shared values. They are looked up by their bytes, because Python salts hashes of bytes (but not of
    numbers), so a crafted program cannot cause hash collisions."""

    def __init__(self, out: Writer) -> None:
        self._out = out
        self._numbers: dict[bytes, int] = {}

    def put(self, content: bytes, write: Callable[[], None]) -> None:
        known = self._numbers.get(content)
        if known is not None:
            self._out.number(len(self._numbers) - known)
            return
        self._out.number(0)
        write()
        self._numbers[content] = len(self._numbers)

    def text(self, value: str) -> None:
        self.put(value.encode(errors="surrogatepass"), lambda: self._out.text(value))


class SharedReader(Generic[T]):
    """Reads the values that a `SharedWriter` wrote."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._values: list[T] = []

    def get(self, read: Callable[[], T]) -> T:
        ago = self._source.number()
        if ago > len(self._values):
            raise self._source.fault(
                f"a shared value {ago} back is referenced, and there are {len(self._values)} so far"
            )
        if ago:
            return self._values[-ago]
        value = read()
        self._values.append(value)
        return value


class WordReader(SharedReader[str]):
    """Reads shared texts."""

    def text(self) -> str:
        return self.get(self._source.text)

    def word(self, kind: type[Word]) -> Word:
        """A shared text that names a member of an enumeration."""
        text = self.text()
        try:
            return kind(text)
        except ValueError:
            raise self._source.fault(f"there is no {kind.__name__.lower()} {text[:40]!r}") from None
