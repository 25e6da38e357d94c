"""A terminal emulator for rich's output: enough to see the final screen."""

import os
import re

_TOKEN = re.compile(rb"\x1b\[(\??[0-9;]*)([A-Za-z])|[\r\n]|[^\r\n\x1b]+")


class Screen:
    def __init__(self) -> None:
        self.cursor_is_seen = True
        self._lines = [""]
        self._row = 0
        self._column = 0

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines if line.strip()]

    def feed(self, said: bytes) -> None:
        for token in _TOKEN.finditer(said):
            if token[2] is not None:
                self._control(token[1].decode(), token[2].decode())
            elif token[0] == b"\r":
                self._column = 0
            elif token[0] == b"\n":
                self._row += 1
                self._lines += [""] * (self._row + 1 - len(self._lines))
            else:
                self._write(token[0].decode(errors="replace"))

    def _write(self, text: str) -> None:
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + text + line[self._column + len(text) :]
        self._column += len(text)

    def _control(self, argument: str, letter: str) -> None:
        if letter == "A":
            self._row -= int(argument or 1)
        elif (argument, letter) == ("2", "K"):
            self._lines[self._row] = ""
        elif argument == "?25":
            self.cursor_is_seen = letter == "h"
        elif letter != "m":
            raise AssertionError(f"the terminal was told ESC[{argument}{letter}, which is more than it should be")


def read_some(terminal: int) -> bytes:
    """Read what is available; empty after the other side has closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""
