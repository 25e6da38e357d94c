"""How many instructions each engine has done in program order, up to here: what waits are told from."""

from collections.abc import Mapping

from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.instructions import Engine

PerTurn = Mapping[Engine, int]


class Progress:
    def __init__(self) -> None:
        self._done: dict[Engine, Affine] = {}
        self._around: list[tuple[dict[Engine, Affine], int, PerTurn]] = []

    @property
    def loops(self) -> int:
        """How many are around."""
        return len(self._around)

    def done(self, engine: Engine) -> Affine:
        return self._done.get(engine, Affine())

    def step(self, engine: Engine) -> None:
        self._done[engine] = self.done(engine) + 1

    def enter(self, count: int, each: PerTurn) -> None:
        self._around.append((dict(self._done), count, each))
        for engine, number in each.items():
            self._done[engine] = self.done(engine) + index(self.loops - 1) * number

    def leave(self) -> None:
        self._done, count, each = self._around.pop()
        for engine, number in each.items():
            self._done[engine] = self.done(engine) + number * count
