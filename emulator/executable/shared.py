"""Values that come again are written once, and after that as how many different ones ago that was."""

from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

from nxpipe.emulator.executable.spelling import Reader, Writer

T = TypeVar("T")
Word = TypeVar("Word", bound=StrEnum)


class SharedWriter:
    """Values are known by their bytes, whose hashes nobody can choose so that many collide, as those of numbers."""

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
    """The reader's side of `Written`."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._values: list[T] = []

    def get(self, read: Callable[[], T]) -> T:
        ago = self._source.number()
        if ago > len(self._values):
            raise self._source.fault(f"something is said to be {ago} ago, and there were {len(self._values)} so far")
        if ago:
            return self._values[-ago]
        value = read()
        self._values.append(value)
        return value


class WordReader(SharedReader[str]):
    def text(self) -> str:
        return self.get(self._source.text)

    def word(self, kind: type[Word]) -> Word:
        """A word that is one of a set."""
        text = self.text()
        try:
            return kind(text)
        except ValueError:
            raise self._source.fault(f"there is no {kind.__name__.lower()} {text[:40]!r}") from None
