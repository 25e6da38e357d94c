"""Redundant waits of a program, found by executing all iterations of its loops.

A wait is redundant if, in every iteration, the engine's knowledge of the others is the same without it.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nxpipe.emulator.isa.instruction import Engine, Instruction, Wait
from nxpipe.emulator.isa.program import Program, executed

Known = Mapping[Engine, int]


class _Moment(NamedTuple):
    """An executed instruction: its engine's knowledge before, that of each wait, and its knowledge after."""

    instruction: Instruction
    before: Known
    told: Mapping[Wait, Known]
    after: Known


def redundant(program: Program) -> dict[int, set[Wait]]:
    """The redundant waits by the identity of the instruction."""
    found: dict[int, set[Wait]] = {}
    for instruction, before, told, _ in _moments(program):
        implied = {
            wait
            for wait in told
            if told[wait][wait.engine] < 1
            or any(
                known.get(wait.engine, 0) >= told[wait][wait.engine]
                for known in (before, *(more for other, more in told.items() if other is not wait))
            )
        }
        found[id(instruction)] = found.get(id(instruction), implied) & implied
    return {number: waits for number, waits in found.items() if waits}


def knowledge(program: Program) -> list[Known]:
    """The knowledge of each instruction's engine about all engines after its execution, in program order."""
    return [{engine: count for engine, count in moment.after.items() if count > 0} for moment in _moments(program)]


def _moments(program: Program) -> Iterator[_Moment]:
    known: dict[Engine, Known] = {engine: {} for engine in Engine}
    then: dict[tuple[Engine, int], Known] = {}
    done = dict.fromkeys(Engine, 0)
    for instruction, turns in executed(program.body):
        engine, before = instruction.engine, known[instruction.engine]
        document: dict[Wait, Known] = {}
        for wait in instruction.waits:
            count = wait.done.at(turns)
            document[wait] = {**then.get((wait.engine, count), {}), wait.engine: count}
        done[engine] += 1
        after = _merged([before, *document.values(), {engine: done[engine]}])
        known[engine] = then[engine, done[engine]] = after
        yield _Moment(instruction, before, document, after)


def _merged(all_known: list[Known]) -> Known:
    return {engine: max(known.get(engine, 0) for known in all_known) for known in all_known for engine in known}
