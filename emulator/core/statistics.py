"""What a run amounted to."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

from nxpipe.emulator.core.bound import Bound
from nxpipe.emulator.isa.instruction import Engine
from nxpipe.emulator.isa.operands import Far, Place, Tile
from nxpipe.emulator.isa.tensor import Matmul


@dataclass(frozen=True)
class Statistics:
    """Of one core: instructions carried out by name and by engine, and bytes read and written by memory. A byte that a
    pattern reads several times counts several times."""

    instructions: Mapping[str, int] = field(default_factory=dict)
    engines: Mapping[Engine, int] = field(default_factory=dict)
    read: Mapping[str, int] = field(default_factory=dict)
    written: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: "Statistics") -> "Statistics":
        """Of both runs together."""
        both = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return Statistics(*(dict(Counter(one) + Counter(more)) for one, more in both))

    def document(self) -> dict[str, object]:
        """For a report, in an order that does not change."""
        return {
            "instructions": sum(self.engines.values()),
            "by_engine": dict(sorted(self.engines.items())),
            "by_kind": dict(sorted(self.instructions.items())),
            "bytes_read": dict(sorted(self.read.items())),
            "bytes_written": dict(sorted(self.written.items())),
        }


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
