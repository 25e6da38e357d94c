"""What one node leaves for another need not go to HBM and back where SBUF has room between them.

A program is written as if it had to. Afterwards, scratch that is a matrix of rows, and that nothing but copies of up to
128 rows at a time touch, is given places in SBUF that no node needs that is carried out while it lives; and so are
constants that are read again and again. Copies between HBM and SBUF then become copies inside of SBUF; nothing else
changes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory
from nxpipe.emulator.isa.program import Buffer, Loop, Role, Step
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.matrix import Matrix, lying_in

_ALIGNMENT: Final = 64


@dataclass
class _Use:
    """How a buffer is used: by which instructions, and in which stages of the program."""

    copies: list[tuple[Instruction, tuple[int, ...]]] = field(default_factory=list)
    stages: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)  # each with the loop around it

    @property
    def life(self) -> tuple[int, int]:
        """One that is used in a repeat and outside of it lives as long as the repeat."""
        loops = {loop for _, loop in self.stages}
        if len(loops) == 1:
            numbers = [stage for stage, _ in self.stages]
        else:
            numbers = [end for stage, loop in self.stages for end in (loop or (stage, stage))]
        return min(numbers), max(numbers)


@dataclass(frozen=True)
class _Candidate:
    buffer: int
    matrix: Matrix
    size: int  # bytes of each partition
    life: tuple[int, int]
    traffic: int


@dataclass(frozen=True)
class Settled:
    """`kept`: of nodes, the bytes of a partition that what stays takes while the node is carried out; `refused`: the
    same of each that found no room, those first that would save most."""

    body: tuple[Step, ...]
    table: tuple[Buffer, ...]
    kept: Counter[object]
    refused: tuple[Counter[object], ...]


def settled(body: Sequence[Step], table: Sequence[Buffer], makers: Mapping[int, object], core: CoreSpec) -> Settled:
    """`makers`: of each step that a node wrote, by its identity, which node that is."""
    survey = _Survey(body, makers)
    candidates = sorted(_candidates(survey, table), key=lambda each: (-each.traffic / each.size, each.buffer))
    taken: list[tuple[_Candidate, int]] = []
    refused = []
    for each in candidates:
        address = _place(each, survey.peaks, taken, core.sbuf_usable)
        if address is None:
            refused.append(each)
        else:
            taken.append((each, address))
    homes = {each.buffer: replace(each.matrix, address=address) for each, address in taken}
    moving = _Moving(homes, table)
    loads = [moving.loaded(number) for number in homes if table[number].role is Role.CONSTANT]
    return Settled(
        (*loads, *moving.steps(body, ())),
        tuple(table[number] for number in moving.numbers),
        sum((survey.rooms(each) for each, _ in taken), Counter[object]()),
        tuple(survey.rooms(each) for each in refused),
    )


class _Survey:
    """What a program does with its memories, stage by stage: a stage is what one node wrote."""

    def __init__(self, body: Sequence[Step], makers: Mapping[int, object]) -> None:
        self.uses: dict[int, _Use] = {}
        self.peaks: list[int] = []  # of each stage, the bytes of a partition that its tiles reach
        self.nodes: list[object] = []
        self._makers = makers
        self._visit(body, (), None)

    def _visit(self, body: Sequence[Step], counts: tuple[int, ...], loop: tuple[int, int] | None) -> None:
        for step in body:
            if isinstance(step, Loop) and any(id(inner) in self._makers for inner in step.body):
                first = len(self.peaks)
                self._visit(step.body, (*counts, step.count), (first, first + self._stages(step.body) - 1))
                continue
            maker = self._makers.get(id(step), id(step))
            if not self.nodes or self.nodes[-1] != maker:
                self.nodes.append(maker)
                self.peaks.append(0)
            self._note(step, counts, loop)

    def rooms(self, each: _Candidate) -> Counter[object]:
        """What it takes while each node is carried out."""
        return Counter(dict.fromkeys(self.nodes[each.life[0] : each.life[1] + 1], each.size))

    def _stages(self, body: Sequence[Step]) -> int:
        makers = [self._makers.get(id(step), id(step)) for step in body]
        return sum(number == 0 or maker != makers[number - 1] for number, maker in enumerate(makers))

    def _note(self, step: Step, counts: tuple[int, ...], loop: tuple[int, int] | None) -> None:
        if isinstance(step, Loop):
            for inner in step.body:
                self._note(inner, (*counts, step.count), loop)
            return
        stage = len(self.peaks) - 1
        for place in step.places.values():
            if isinstance(place, Far):
                use = self.uses.setdefault(place.buffer, _Use())
                use.copies.append((step, counts))
                use.stages.append((stage, loop))
            elif place.memory is Memory.SBUF:
                end = place.offset.bounds(counts)[1] + place.reach[1]
                self.peaks[stage] = max(self.peaks[stage], end)


def _candidates(survey: _Survey, table: Sequence[Buffer]) -> Iterator[_Candidate]:
    for number, use in survey.uses.items():
        buffer = table[number]
        if buffer.role not in (Role.SCRATCH, Role.CONSTANT):
            continue
        matrix = next((each for each in _matrices(buffer) if _fits(use, number, each, buffer.dtype)), None)
        if matrix is not None:
            size = buffer.elements * len(buffer.names) // PARTITIONS * buffer.dtype.itemsize
            traffic = sum(
                prod(counts) * moved(place)
                for copy, counts in use.copies
                for place in copy.places.values()
                if isinstance(place, Far) and place.buffer == number
            )
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            if buffer.role is Role.SCRATCH:
                yield _Candidate(number, matrix, size, use.life, traffic)
            elif traffic > buffer.nbytes:  # it is loaded once, at the beginning, for all turns of a repeat
                last = max(loop[1] if loop else stage for stage, loop in use.stages)
                yield _Candidate(number, matrix, size, (0, last), traffic - buffer.nbytes)


def _matrices(buffer: Buffer) -> Iterator[Matrix]:
    """Ways to see it as rows that fill all lanes."""
    for axis in range(len(buffer.shape), 0, -1):
        rows, width = prod(buffer.shape[:axis]), prod(buffer.shape[axis:])
        if width > 1 and rows and not rows % PARTITIONS:
            yield Matrix(width)


def _fits(use: _Use, number: int, matrix: Matrix, dtype: DType) -> bool:
    """Whether all copies can go there; rows of other elements would be as many elements wide as they are not."""
    places = [place for copy, _ in use.copies for place in copy.places.values()]
    own = [place for place in places if isinstance(place, Far) and place.buffer == number]
    alike = all(place.dtype.itemsize == dtype.itemsize for place in own)
    return alike and all(lying_in(copy, {number: matrix}, counts) is not None for copy, counts in use.copies)


def _place(each: _Candidate, peaks: Sequence[int], taken: Sequence[tuple[_Candidate, int]], usable: int) -> int | None:
    """The highest place that is free all its life."""
    first, last = each.life
    floor = max(peaks[first : last + 1])
    busy = sorted(
        (
            (address, address + other.size)
            for other, address in taken
            if other.life[0] <= last and first <= other.life[1]
        ),
        reverse=True,
    )
    top = usable // _ALIGNMENT * _ALIGNMENT
    for low, high in busy:
        if top - each.size >= high:
            break
        top = min(top, low)
    return top - each.size if top - each.size >= floor else None


class _Moving:
    """`numbers`: of what remains in HBM, and those that it has then."""

    def __init__(self, homes: Mapping[int, Matrix], table: Sequence[Buffer]) -> None:
        self._homes, self._table = homes, table
        left = [number for number, each in enumerate(table) if number not in homes or each.role is Role.CONSTANT]
        self.numbers = {number: at for at, number in enumerate(left)}

    def loaded(self, number: int) -> Instruction:
        """A constant, before everything else."""
        home, buffer = self._homes[number], self._table[number]
        rows = buffer.elements // home.width
        axes = (Axis(PARTITIONS, home.width), Axis(rows // PARTITIONS, home.block), Axis(home.width, 1))
        far = Far(number, buffer.dtype, Affine(), axes)
        tile = home.tile(far, ())
        assert tile is not None  # whole blocks of rows
        return DmaCopy(engine=DMA_QUEUES[0], dst=tile, src=replace(far, buffer=self.numbers[number]))

    def steps(self, body: Sequence[Step], counts: tuple[int, ...]) -> Iterator[Step]:
        for step in body:
            if isinstance(step, Loop):
                yield Loop(step.count, tuple(self.steps(step.body, (*counts, step.count))))
            else:
                yield self._step(step, counts)

    def _step(self, step: Instruction, counts: tuple[int, ...]) -> Instruction:
        named = {place.buffer for place in step.places.values() if isinstance(place, Far)}
        if not named.isdisjoint(self._homes):
            lying = lying_in(step, self._homes, counts)
            assert lying is not None  # or it would not have been given a place
            step = lying
        far = {name: place for name, place in step.places.items() if isinstance(place, Far)}
        changed = {name: replace(place, buffer=self.numbers[place.buffer]) for name, place in far.items()}
        return replace(step, **changed) if changed else step  # type: ignore[arg-type]
