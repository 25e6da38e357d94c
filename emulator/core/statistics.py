"""What a run amounted to."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from emulator.core.bound import Bound
from emulator.isa.instructions import Engine, Matmul
from emulator.isa.operands import Far, Place, Tile


@dataclass(frozen=True)
class Statistics:
    """Of one core: instructions carried out by name and by engine, and bytes read and written by memory. A byte that a
    pattern reads several times counts several times."""

    instructions: Mapping[str, int]
    engines: Mapping[Engine, int]
    read: Mapping[str, int]
    written: Mapping[str, int]


def count(everything: Iterable[Bound]) -> Statistics:
    names, engines, read, written = Counter[str](), Counter[Engine](), Counter[str](), Counter[str]()
    for bound in everything:
        instruction = bound.instruction
        names[instruction.name] += bound.times
        engines[instruction.engine] += bound.times
        for place in instruction.read():
            # A matmul reads its sums only when it adds to them.
            times = bound.added if isinstance(instruction, Matmul) and place is instruction.dst else bound.times
            read[_memory(place)] += times * _nbytes(place)
        for place in instruction.written():
            written[_memory(place)] += bound.times * _nbytes(place)
    return Statistics(dict(+names), dict(+engines), dict(+read), dict(+written))


def _memory(place: Place) -> str:
    return "hbm" if isinstance(place, Far) else place.memory.value


def _nbytes(place: Place) -> int:
    lanes = place.partitions if isinstance(place, Tile) else 1
    return lanes * place.elements * place.dtype.itemsize
