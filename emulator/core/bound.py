"""An instruction bound to one core's memories: all that can be known of it before the loops turn."""

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from nxpipe.emulator.core.cells import floats
from nxpipe.emulator.core.memory import Memories
from nxpipe.emulator.core.places import RowsWindow, Window, window
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Tile
from nxpipe.emulator.numerics import Array, Floats

ENGINES = tuple(Engine)
NUMBER = {engine: number for number, engine in enumerate(ENGINES)}


class Bound:
    def __init__(self, instruction: Instruction, memories: Memories) -> None:
        self.instruction = instruction
        self.core = memories.core
        self.engine = NUMBER[instruction.engine]
        self.waits = tuple((NUMBER[wait.engine], wait.done) for wait in instruction.waits)
        self.indices: tuple[int, ...] = ()
        self.times = 0
        self.added = 0  # of these, how often to sums that were there already
        self._windows = {name: window(place, memories) for name, place in instruction.places.items()}

    @cached_property
    def rows(self) -> tuple[RowsWindow, ...]:
        return tuple(each for each in self._windows.values() if isinstance(each, RowsWindow))

    @cached_property
    def direct(self) -> tuple[tuple[Window, bool], ...]:
        """Places that are known before anything is read, each with whether it is written."""
        numbers = tuple((each.rows, False) for each in self.rows)
        return numbers + tuple(each for each in self._accesses() if not isinstance(each[0], RowsWindow))

    @cached_property
    def indirect(self) -> tuple[tuple[Window, bool], ...]:
        return tuple(each for each in self._accesses() if isinstance(each[0], RowsWindow))

    def _accesses(self) -> Iterator[tuple[Window, bool]]:
        """What is both read and written stands here as written, which is enough to tell who meets whom."""
        for name, each in self._windows.items():
            yield each, name in self.instruction.writes

    def forget(self) -> None:
        self.times = self.added = 0
        for each in (*self._windows.values(), *(rows.rows for rows in self.rows)):
            each.forget()

    def locate(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        for each in self._windows.values():
            each.locate(indices)

    def window(self, name: str) -> Window:
        return self._windows[name]

    def numbers(self, name: str) -> Array:
        """Floats as float32, integers as they are: a row for each partition; not to be written to."""
        return self._windows[name].numbers()

    def floats(self, name: str) -> Floats:
        return floats(self._windows[name].numbers())

    def scalar(self, name: str) -> Array:
        """A number, or a column with one for each partition."""
        value = getattr(self.instruction, name)
        return self.floats(name) if isinstance(value, Tile) else np.asarray(value, np.float32)

    def put(self, numbers: Array, name: str = "dst") -> None:
        self._windows[name].put(numbers)
