"""The numbers of instructions: the how manieth of its engine each one is, in any turn of the loops around it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from nxpipe.emulator.isa.affine import Affine, index
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.program import Loop, Step, counted

_AT_MOST: Final = 4  # waits of one instruction for one engine


@dataclass(eq=False, frozen=True)
class Around:
    """A loop, and how many instructions of each engine one turn of it carries out."""

    count: int
    each: dict[Engine, int]


@dataclass(eq=False)
class Here:
    """An instruction where it stands. `done` is the number of its engine's instructions with it, `before` of every
    engine's without it, both for any turn of the loops around."""

    instruction: Instruction
    order: int
    loops: tuple[Around, ...]
    done: Affine
    before: dict[Engine, Affine]
    waits: dict[Engine, list[Affine]] = field(default_factory=lambda: defaultdict(list))
    _ago: dict[tuple[int, int], Affine] = field(default_factory=dict)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(loop.count for loop in self.loops)

    def done_ago(self, common: int, turns: int) -> Affine:
        """Its number so many turns ago of the last of the first `common` loops, at the end of all loops inside."""
        if (common, turns) not in self._ago:
            done = self.done
            for depth in range(common, len(self.loops)):
                done = _at_last(done, depth, self.loops[depth].count)
            each = self.loops[common - 1].each[self.instruction.engine] if turns else 0
            self._ago[common, turns] = done + -turns * each
        return self._ago[common, turns]

    def wait(self, engine: Engine, done: Affine) -> None:
        """Of two waits for an engine the one that asks for more is enough. Everything before is enough for any."""
        if (
            done in self.waits[engine]
            or done.bounds(self.counts)[1] < 1
            or any(self._covers(known, done) for known in self.waits[engine])
        ):
            return
        kept = [known for known in self.waits[engine] if not self._covers(done, known)]
        self.waits[engine] = [*kept, done]
        if len(self.waits[engine]) > _AT_MOST or not self._covers(self.before[engine], done):
            self.waits[engine] = [self.before[engine]]

    def _covers(self, more: Affine, less: Affine) -> bool:
        if more.terms == less.terms:
            return more.base >= less.base
        return (more + less * -1).bounds(self.counts)[0] >= 0


class Numbering:
    """Gives every instruction its number, in the order of the text."""

    def __init__(self) -> None:
        self._totals: dict[Engine, Affine] = defaultdict(Affine)
        self._found: list[Here] = []

    def walk(self, body: Sequence[Step], loops: tuple[Around, ...] = ()) -> list[Here]:
        for step in body:
            if isinstance(step, Loop):
                self._walk_loop(step, loops)
                continue
            before = defaultdict(Affine, self._totals)
            self._totals[step.engine] += 1
            self._found.append(Here(step, len(self._found), loops, self._totals[step.engine], before))
        return self._found

    def _walk_loop(self, loop: Loop, loops: tuple[Around, ...]) -> None:
        before, each = dict(self._totals), counted(loop.body)
        for engine, count in each.items():
            self._totals[engine] += index(len(loops)) * count
        self.walk(loop.body, (*loops, Around(loop.count, each)))
        for engine, count in each.items():
            self._totals[engine] = before.get(engine, Affine()) + count * loop.count


def _at_last(number: Affine, depth: int, count: int) -> Affine:
    coefficient = dict(number.terms).get(depth, 0)
    return replace(
        number,
        base=number.base + coefficient * (count - 1),
        terms=tuple(term for term in number.terms if term[0] != depth),
    )
