"""Which waits of a program say nothing that the others do not say.

In no turn of any loop does leaving one of them out change what the waiting engine knows of the others. All of them can
be left out at once, since none can imply what implies it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from emulator.isa.instructions import Engine, Wait
from emulator.isa.program import Loop, Program, Step, executed

Known = Mapping[Engine, int]


def redundant(program: Program) -> dict[int, set[Wait]]:
    """By the identity of the instruction."""
    known: dict[Engine, Known] = {engine: {} for engine in Engine}
    then: dict[tuple[Engine, int], Known] = {}
    found: dict[int, set[Wait]] = {}
    done = dict.fromkeys(Engine, 0)
    for instruction, turns in executed(program.body):
        mine = known[instruction.engine]
        asked = {wait: wait.done.at(turns) for wait in instruction.waits}
        gained = {wait: {wait.engine: count, **then.get((wait.engine, count), {})} for wait, count in asked.items()}
        implied = {
            wait
            for wait, count in asked.items()
            if any(each.get(wait.engine, 0) >= count for each in (mine, *_without(gained, wait))) or count < 1
        }
        found[id(instruction)] = found.get(id(instruction), implied) & implied
        done[instruction.engine] += 1
        after = _merged([mine, *gained.values(), {instruction.engine: done[instruction.engine]}])
        known[instruction.engine] = then[instruction.engine, done[instruction.engine]] = after
    return found


def reduced(program: Program) -> Program:
    """Without them."""
    found = redundant(program)

    def walk(body: tuple[Step, ...]) -> Iterator[Step]:
        for step in body:
            if isinstance(step, Loop):
                yield Loop(step.count, tuple(walk(step.body)))
            else:
                yield step.after(*(wait for wait in step.waits if wait not in found.get(id(step), ())))

    return replace(program, body=tuple(walk(program.body)))


def _without(gained: Mapping[Wait, Known], wait: Wait) -> Iterator[Known]:
    return (known for other, known in gained.items() if other is not wait)


def _merged(all_known: list[Known]) -> Known:
    return {engine: max(known.get(engine, 0) for known in all_known) for known in all_known for engine in known}
