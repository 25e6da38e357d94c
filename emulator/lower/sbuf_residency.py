"""SBUF residency: promotion of buffers from HBM to SBUF, where kernels leave space between producer and consumer.

Kernels are emitted as if every result went through HBM. Afterwards, scratch that all its copies treat as a matrix of
rows, up to 128 rows at a time, can live in SBUF with row r on partition r modulo 128. It gets an address that no kernel
uses during its life. So do constants that are read more than once; they are loaded at the start. Its DMA copies become
copies inside SBUF; no other instruction changes, so that promotion cannot change a result.

Promotion comes after emission because only then are a buffer's copies and each kernel's peak use of SBUF known. The
opposite order would have to reserve space for buffers before knowing what that costs the kernels.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final

from nxpipe.emulator.errors import OutOfMemory
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine, RotatingOffset
from nxpipe.emulator.isa.constraints import MOST_AXES
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Tile
from nxpipe.emulator.isa.program import Buffer, Loop, Role, Step
from nxpipe.emulator.lower.emission import emit_kernels
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.kernel_cost import expected_ns
from nxpipe.emulator.lower.records import EmittedProgram, ResidentBuffer, ResidentProgram


@dataclass(frozen=True)
class SbufMatrix:
    """A buffer as a matrix of rows in SBUF, from an address of each partition on."""

    width: int
    address: int = 0

    @property
    def block(self) -> int:
        """Elements of 128 rows."""
        return PARTITIONS * self.width

    def tile(self, far: Far, counts: Sequence[int]) -> Tile | None:
        """The tile that an access pattern in HBM becomes; None if partitions and strides cannot express it."""
        if far.rows is not None or far.offset.base < 0:
            return None
        lane, start = divmod(far.offset.base % self.block, self.width)
        axes = [axis for axis in far.axes if axis.size != 1]
        rows = axes[0].size if axes and axes[0].stride == self.width else 1
        inner = [self._axis(axis) for axis in (axes[1:] if rows > 1 else axes)]
        terms = [(depth, self._inside(step)) for depth, step in far.offset.terms]
        turns = [(turn, self._inside(turn.step)) for turn in far.offset.turns]
        found = [*(axis.stride for axis in inner if axis), *(step for _, step in terms), *(step for _, step in turns)]
        if lane + rows > PARTITIONS or None in inner or None in found or len(inner) > MOST_AXES:
            return None
        ways = [(axis.size, axis.stride) for axis in axes[rows > 1 :]]
        ways += [(counts[depth], step) for depth, step in far.offset.terms]
        ways += [(turn.count, turn.step) for turn in far.offset.turns]
        if start + sum((times - 1) * (step % self.block) for times, step in ways) >= self.width:
            return None
        size = far.dtype.itemsize
        base = far.offset.base // self.block * self.width + start
        offset = Affine(
            self.address + base * size,
            tuple((depth, (step or 0) * size) for depth, step in terms),
            tuple(RotatingOffset((step or 0) * size, turn.count, turn.of) for turn, step in turns),
        )
        kept = tuple(axis for axis in inner if axis) or (Axis(1, 1),)
        return Tile(Memory.SBUF, far.dtype, lane, rows, offset, kept)

    def _inside(self, step: int) -> int | None:
        """The step within a partition that a step in HBM becomes: within a row, or over whole blocks of 128 rows."""
        blocks, rest = divmod(step, self.block)
        return None if step < 0 or rest >= self.width else blocks * self.width + rest

    def _axis(self, axis: Axis) -> Axis | None:
        stride = self._inside(axis.stride)
        return None if stride is None else Axis(axis.size, stride)


def _by_lanes(copy: DmaCopy, buffer: int, width: int) -> DmaCopy:
    """A copy in HBM with the rows of one side split into blocks of 128, as partitions need them."""
    sides = (copy.dst, copy.src)
    if not all(isinstance(side, Far) and side.rows is None for side in sides):
        return copy
    own = copy.dst if isinstance(copy.dst, Far) and copy.dst.buffer == buffer else copy.src
    assert isinstance(own, Far)
    if [axis.size for axis in copy.dst.axes] != [axis.size for axis in copy.src.axes]:
        return copy
    split = _split(own.axes, width)
    if split is None:
        return copy
    dst, src = (_reordered(side.axes, *split) for side in sides)
    return (
        copy
        if len(dst) > MOST_AXES
        else replace(copy, dst=replace(copy.dst, axes=dst), src=replace(copy.src, axes=src))
    )


def _split(axes: Sequence[Axis], width: int) -> tuple[int, int, int] | None:
    """The axis that runs over many rows, with its number of blocks of 128 and of elements within a row."""
    for at, axis in enumerate(axes):
        within = width if axis.stride == 1 else 1
        rows, rest = divmod(axis.size, within)
        if axis.stride * within == width and not rest and rows > PARTITIONS and not rows % PARTITIONS:
            return at, rows // PARTITIONS, within
    return None


def _reordered(axes: Sequence[Axis], at: int, blocks: int, within: int) -> tuple[Axis, ...]:
    stride = axes[at].stride
    parts = (Axis(blocks, stride * within * PARTITIONS), *([Axis(within, stride)] if within > 1 else []))
    return (Axis(PARTITIONS, stride * within), *axes[:at], *parts, *axes[at + 1 :])


def sbuf_copy(step: Instruction, homes: Mapping[int, SbufMatrix], counts: tuple[int, ...]) -> Instruction | None:
    """A copy with its promoted sides in SBUF; None if it cannot be expressed there."""
    if not isinstance(step, DmaCopy):
        return None
    for name in ("dst", "src"):
        far = getattr(step, name)
        if isinstance(far, Far) and far.buffer in homes:
            home = homes[far.buffer]
            step = _by_lanes(step, far.buffer, home.width)
            tile = home.tile(getattr(step, name), counts)
            if tile is None:
                return None
            step = replace(step, **{name: tile})  # type: ignore[arg-type]
    return step


_ALIGNMENT: Final = 64
_MOST_FAILURES: Final = 3  # second emissions that are not faster


@dataclass
class _Use:
    """The copies of a buffer, and the stages of the program in which they are."""

    copies: list[tuple[Instruction, tuple[int, ...]]] = field(default_factory=list)
    stages: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)  # each with the loop around it

    @property
    def life(self) -> tuple[int, int]:
        """First and last stage. A buffer that is used both in a repeat and outside of it lives as long as the
        repeat."""
        loops = {loop for _, loop in self.stages}
        if len(loops) == 1:
            numbers = [stage for stage, _ in self.stages]
        else:
            numbers = [end for stage, loop in self.stages for end in (loop or (stage, stage))]
        return min(numbers), max(numbers)


@dataclass(frozen=True)
class _Candidate:
    """A buffer that can be promoted, with its size, its life, and the HBM traffic that promotion saves."""

    buffer: int
    matrix: SbufMatrix
    size: int  # bytes of each partition
    life: tuple[int, int]
    traffic: int


def promote_to_sbuf(emitted: EmittedProgram) -> ResidentProgram:
    """Move buffers to SBUF, those first that save the most traffic per byte of SBUF, as long as there is space.

    A greedy choice by density is near the optimum of this knapsack, since each buffer is small beside SBUF.
    """
    body, table = emitted.body, emitted.buffers
    survey = _Survey(body, emitted.makers)
    candidates = sorted(_candidates(survey, table), key=lambda each: (-each.traffic / each.size, each.buffer))
    taken: list[tuple[_Candidate, int]] = []
    refused = []
    for each in candidates:
        address = _find_address(each, survey.peaks, taken, CORES[emitted.placed.target.core].sbuf_usable)
        if address is None:
            refused.append(each)
        else:
            taken.append((each, address))
    homes = {each.buffer: replace(each.matrix, address=address) for each, address in taken}
    rewriter = _Rewriter(homes, table)
    loads = [rewriter.loaded(number) for number in homes if table[number].role is Role.CONSTANT]
    return ResidentProgram(
        emitted=emitted,
        buffers=tuple(table[number] for number in rewriter.numbers),
        body=(*loads, *rewriter.steps(body, ())),
        residents=tuple(ResidentBuffer(table[each.buffer], each.size, address) for each, address in taken),
        kept=sum((survey.bytes_of(each) for each, _ in taken), Counter[object]()),
        refused=tuple(survey.bytes_of(each) for each in refused),
    )


def reserve_sbuf(resident: ResidentProgram) -> ResidentProgram:
    """Emit the kernels again in less SBUF, so that a refused buffer finds space; keep what is expected to be faster.

    Kernels take all of SBUF that helps them, for instance a weight of several MiB, before anything is known of what
    could live beside them. Only a second emission tells what a kernel costs in less space, because its tiling changes
    with it. Refused buffers are tried in the order of what they would save; after three that do not pay, the rest are
    left in HBM, which bounds the compile time.
    """
    core = CORES[resident.emitted.placed.target.core]
    best, failed = resident, 0
    best_ns = expected_ns(best.body, core) if best.refused else 0.0
    while failed < min(_MOST_FAILURES, len(best.refused)):
        try:
            other = promote_to_sbuf(emit_kernels(resident.emitted.placed, best.kept + best.refused[failed]))
        except OutOfMemory:
            failed += 1
            continue
        ns = expected_ns(other.body, core)
        if ns < best_ns:
            best, best_ns = other, ns
        else:
            failed += 1
    return best


class _Survey:
    """Uses of buffers and peak use of SBUF in each stage of a program. A stage is the steps of one node."""

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

    def bytes_of(self, each: _Candidate) -> Counter[object]:
        """The bytes of a partition that a candidate takes while each node's kernel runs."""
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
        matrix = next((each for each in _matrices(buffer) if _is_promotable(use, number, each, buffer.dtype)), None)
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
            elif traffic > buffer.nbytes:  # it is loaded once, at the beginning, for all iterations of a repeat
                last = max(loop[1] if loop else stage for stage, loop in use.stages)
                yield _Candidate(number, matrix, size, (0, last), traffic - buffer.nbytes)


def _matrices(buffer: Buffer) -> Iterator[SbufMatrix]:
    """The ways to see a buffer as rows that fill all partitions."""
    for axis in range(len(buffer.shape), 0, -1):
        rows, width = prod(buffer.shape[:axis]), prod(buffer.shape[axis:])
        if width > 1 and rows and not rows % PARTITIONS:
            yield SbufMatrix(width)


def _is_promotable(use: _Use, number: int, matrix: SbufMatrix, dtype: DType) -> bool:
    """True if all copies of a buffer can be expressed in SBUF, in elements of its own size."""
    places = [place for copy, _ in use.copies for place in copy.places.values()]
    own = [place for place in places if isinstance(place, Far) and place.buffer == number]
    alike = all(place.dtype.itemsize == dtype.itemsize for place in own)
    return alike and all(sbuf_copy(copy, {number: matrix}, counts) is not None for copy, counts in use.copies)


def _find_address(
    each: _Candidate, peaks: Sequence[int], taken: Sequence[tuple[_Candidate, int]], usable: int
) -> int | None:
    """The highest address that is free during the candidate's life. Kernels allocate from 0 upwards, so that the space
    between stays in one piece."""
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


class _Rewriter:
    """Rewrites steps for promoted buffers; `numbers` maps the buffers that remain in HBM to their new positions."""

    def __init__(self, homes: Mapping[int, SbufMatrix], table: Sequence[Buffer]) -> None:
        self._homes, self._table = homes, table
        left = [number for number, each in enumerate(table) if number not in homes or each.role is Role.CONSTANT]
        self.numbers = {number: at for at, number in enumerate(left)}

    def loaded(self, number: int) -> Instruction:
        """The load of a promoted constant, at the start of the program."""
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
            moved_step = sbuf_copy(step, self._homes, counts)
            assert moved_step is not None  # promoted buffers have only such copies
            step = moved_step
        far = {name: place for name, place in step.places.items() if isinstance(place, Far)}
        changed = {name: replace(place, buffer=self.numbers[place.buffer]) for name, place in far.items()}
        return replace(step, **changed) if changed else step  # type: ignore[arg-type]
