"""SBUF residency: promotion of buffers from HBM to SBUF, if kernels leave space between producer and last consumer.

Kernels are emitted with every result in HBM. A scratch buffer can then be promoted if all its DMA copies access it as a
matrix of rows, up to 128 rows at a time; row r is placed on partition r modulo 128. The buffer gets an SBUF address
that no kernel uses during its live range. Constants that are read more than once are promoted too, and loaded at the
start.

Invariant: promotion replaces only the HBM side of DMA copies by the SBUF location of the same elements, and no other
instruction or promoted buffer uses that location during the live range. It therefore cannot change a result.

Promotion follows emission because a buffer's copies and each kernel's peak use of SBUF are known only then. The
opposite order would have to reserve space for buffers before the cost to the kernels is known.
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
from nxpipe.emulator.isa.constraints import MOST_AXES, MOST_SIZE, STRIDES
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.dma import DmaCopy
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Memory, Place, Tile
from nxpipe.emulator.isa.program import Buffer, Loop, Role, Step
from nxpipe.emulator.lower.emission import emit_kernels
from nxpipe.emulator.lower.kernel import PARTITIONS
from nxpipe.emulator.lower.kernel_cost import expected_ns
from nxpipe.emulator.lower.records import EmittedProgram, ResidentBuffer, ResidentProgram


@dataclass(frozen=True)
class SbufMatrix:
    """A buffer as matrices of rows in SBUF, one for each of its tensors, at an address in each partition. Row r is on
    partition r modulo 128. `allocation` is the number of its tiles, below 0."""

    rows: int
    width: int
    address: int = 0
    allocation: int = 0

    @property
    def elements(self) -> int:
        """Elements of a tensor."""
        return self.rows * self.width

    @property
    def block(self) -> int:
        """Elements of 128 rows."""
        return PARTITIONS * self.width

    @property
    def pitch(self) -> int:
        """Elements of a tensor in each partition."""
        return -(-self.rows // PARTITIONS) * self.width

    def tile(self, far: Far, counts: Sequence[int]) -> Tile | None:
        """The SBUF tile with the elements of an HBM access pattern; None if partitions and strides cannot express it.

        The pattern must start within a row and stay within it in every iteration, or a stride would reach into the next
        row, which is on another partition. It must stay within its tensor's blocks of rows for the same reason."""
        if far.rows is not None or far.offset.base < 0:
            return None
        tensor, rest = divmod(far.offset.base, self.elements)
        row, start = divmod(rest, self.width)
        axes = [axis for axis in far.axes if axis.size != 1]
        lanes = axes[0].size if axes and axes[0].stride == self.width else 1
        inner = [self._axis(axis) for axis in (axes[1:] if lanes > 1 else axes)]
        terms = [(depth, self._inner_stride(stride)) for depth, stride in far.offset.terms]
        rotations = [(rotation, self._inner_stride(rotation.step)) for rotation in far.offset.rotations]
        strides = [
            *(axis.stride for axis in inner if axis),
            *(stride for _, stride in terms),
            *(stride for _, stride in rotations),
        ]
        block, partition = divmod(row, PARTITIONS)
        if partition + lanes > PARTITIONS or None in inner or None in strides or len(inner) > MOST_AXES:
            return None
        movements = [(axis.size, axis.stride) for axis in axes[lanes > 1 :]]
        movements += [(counts[depth], stride) for depth, stride in far.offset.terms]
        movements += [(rotation.count, rotation.step) for rotation in far.offset.rotations]
        steps = [(count, *self._step(stride)) for count, stride in movements]
        last_block = block + sum((count - 1) * blocks for count, blocks, _ in steps)
        reaches = [(count - 1) * elements for count, _, elements in steps]
        if start + sum(reach for reach in reaches if reach < 0) < 0:
            return None
        if start + sum(reach for reach in reaches if reach > 0) >= self.width:
            return None
        if last_block * PARTITIONS + partition + lanes > self.rows:
            return None
        size = far.dtype.itemsize
        base = tensor * self.pitch + block * self.width + start
        offset = Affine(
            self.address + base * size,
            tuple((depth, (stride or 0) * size) for depth, stride in terms),
            tuple(RotatingOffset((stride or 0) * size, rotation.count, rotation.of) for rotation, stride in rotations),
        )
        kept_axes = tuple(axis for axis in inner if axis) or (Axis(1, 1),)
        if any(not STRIDES[0] <= axis.stride <= STRIDES[1] or axis.size > MOST_SIZE for axis in kept_axes):
            return None
        return Tile(Memory.SBUF, far.dtype, partition, lanes, offset, kept_axes, self.allocation)

    def _step(self, stride: int) -> tuple[int, int]:
        """The blocks of rows and the elements in a row of a stride in HBM."""
        return (0, stride) if stride < 0 else divmod(stride % self.elements, self.block)

    def _inner_stride(self, stride: int) -> int | None:
        """The stride in a partition for a stride in HBM: within a row, over whole blocks of 128 rows, or over whole
        tensors; else None."""
        if stride < 0:
            return stride if -stride < self.width else None
        tensors, rest = divmod(stride, self.elements)
        blocks, remainder = divmod(rest, self.block)
        if remainder >= self.width:
            return None
        return tensors * self.pitch + blocks * self.width + remainder

    def _axis(self, axis: Axis) -> Axis | None:
        stride = self._inner_stride(axis.stride)
        return None if stride is None else Axis(axis.size, stride)


def _split_rows(copy: DmaCopy, buffer: int, width: int) -> tuple[DmaCopy, ...]:
    """An HBM copy with the row axis of one side split into one row per partition: whole blocks of 128 rows, and the
    remaining rows."""
    sides = (copy.dst, copy.src)
    if not all(isinstance(side, Far) and side.rows is None for side in sides):
        return (copy,)
    own = copy.dst if isinstance(copy.dst, Far) and copy.dst.buffer == buffer else copy.src
    assert isinstance(own, Far)
    if [axis.size for axis in copy.dst.axes] != [axis.size for axis in copy.src.axes]:
        return (copy,)
    split = _split(own.axes, width)
    if split is None:
        return (copy,)
    index, rows, row_elements = split
    full, remainder = divmod(rows, PARTITIONS)
    parts = [part for part in ((0, PARTITIONS, full), (full * PARTITIONS, remainder, 1)) if all(part[1:])]
    copies = tuple(
        replace(
            copy, dst=_rows_of(copy.dst, index, part, row_elements), src=_rows_of(copy.src, index, part, row_elements)
        )
        for part in parts
    )
    return (copy,) if any(len(part.dst.axes) > MOST_AXES for part in copies) else copies


def _split(axes: Sequence[Axis], width: int) -> tuple[int, int, int] | None:
    """The index of the axis that spans rows, their number, and the elements per row in it. An axis of rows before all
    others needs no split if it has at most 128 of them."""
    for index, axis in enumerate(axes):
        row_elements = width if axis.stride == 1 else 1
        rows, remainder = divmod(axis.size, row_elements)
        if axis.stride * row_elements == width and not remainder and rows > 1:
            return None if not index and row_elements == 1 and rows <= PARTITIONS else (index, rows, row_elements)
    return None


def _rows_of(side: Place, index: int, part: tuple[int, int, int], row_elements: int) -> Far:
    """The part of a side with `lanes` rows in each of `blocks` blocks from a first row on, rows before all other
    axes."""
    assert isinstance(side, Far)
    (first, lanes, blocks), stride = part, side.axes[index].stride
    inner = (
        *([Axis(blocks, stride * row_elements * PARTITIONS)] if blocks > 1 else []),
        *([Axis(row_elements, stride)] if row_elements > 1 else []),
    )
    axes = (Axis(lanes, stride * row_elements), *side.axes[:index], *inner, *side.axes[index + 1 :])
    return replace(side, offset=side.offset + first * stride * row_elements, axes=axes)


def sbuf_copy(
    step: Instruction, homes: Mapping[int, SbufMatrix], counts: tuple[int, ...]
) -> tuple[Instruction, ...] | None:
    """The copies with the promoted sides in SBUF that replace a copy; None if a side cannot be expressed as a tile."""
    if not isinstance(step, DmaCopy):
        return None
    copies: tuple[DmaCopy, ...] = (step,)
    for name in ("dst", "src"):
        far = getattr(step, name)
        if isinstance(far, Far) and far.buffer in homes:
            home = homes[far.buffer]
            copies = tuple(part for copy in copies for part in _split_rows(copy, far.buffer, home.width))
            tiles = [home.tile(getattr(copy, name), counts) for copy in copies]
            if None in tiles:
                return None
            copies = tuple(copy.with_fields(**{name: tile}) for copy, tile in zip(copies, tiles, strict=True))
    return copies


_ALIGNMENT: Final = 64
_MOST_FAILURES: Final = 3  # attempts of `reserve_sbuf` without gain


@dataclass
class _Use:
    """The copies of a buffer, and the stages of the program that contain them."""

    copies: list[tuple[Instruction, tuple[int, ...]]] = field(default_factory=list)
    stages: list[tuple[int, tuple[int, int] | None]] = field(default_factory=list)  # with the enclosing repeat's stages

    @property
    def live_range(self) -> tuple[int, int]:
        """The first and last stage of the live range. A buffer used both in a repeat and outside of it is live during
        the whole repeat, since every iteration needs it."""
        loops = {loop for _, loop in self.stages}
        if len(loops) == 1:
            numbers = [stage for stage, _ in self.stages]
        else:
            numbers = [end for stage, loop in self.stages for end in (loop or (stage, stage))]
        return min(numbers), max(numbers)


@dataclass(frozen=True)
class _Candidate:
    """A buffer that can be promoted, with its size, its live range, and the HBM traffic that promotion saves."""

    buffer: int
    matrix: SbufMatrix
    size: int  # bytes per partition
    live_range: tuple[int, int]
    traffic: int


def promote_to_sbuf(emitted: EmittedProgram) -> ResidentProgram:
    """Promote buffers in decreasing order of the traffic saved per byte of SBUF, as long as space is free.

    Greedy selection by density is near the optimum of this knapsack problem, since each buffer is small compared with
    SBUF.
    """
    body, table = emitted.body, emitted.buffers
    survey = _Survey(body, emitted.emitters)
    candidates = sorted(
        _candidates(survey, table), key=lambda candidate: (-candidate.traffic / candidate.size, candidate.buffer)
    )
    allocations: list[tuple[_Candidate, int]] = []
    homes: dict[int, SbufMatrix] = {}
    refused = []
    for candidate in candidates:
        number, usable = candidate.buffer, CORES[emitted.placed.target.core].sbuf_usable
        # Two buffers may each be promotable, and a copy between them not.
        if not _are_expressible(survey.uses[number], {**homes, number: candidate.matrix}):
            continue
        address = _find_address(candidate, survey.peaks, allocations, usable)
        if address is None:
            refused.append(candidate)
        else:
            allocations.append((candidate, address))
            homes[number] = replace(candidate.matrix, address=address, allocation=-1 - number)
    rewriter = _Rewriter(homes, table)
    loads = [rewriter.loaded(number) for number in homes if table[number].role is Role.CONSTANT]
    return ResidentProgram(
        emitted=emitted,
        buffers=tuple(table[number] for number in rewriter.numbers),
        body=(*loads, *rewriter.steps(body, ())),
        residents=tuple(
            ResidentBuffer(table[one.buffer], one.size, address, one.live_range, -1 - one.buffer)
            for one, address in allocations
        ),
        kept=sum((survey.bytes_of(candidate) for candidate, _ in allocations), Counter[object]()),
        refused=tuple(survey.bytes_of(candidate) for candidate in refused),
    )


def reserve_sbuf(resident: ResidentProgram) -> ResidentProgram:
    """Emit the kernels again with less SBUF, so that a refused buffer fits; keep the faster program by expected time.

    The first emission lets kernels use all of SBUF, for instance for a weight of several MiB, without regard to
    resident buffers. The cost of less space is known only after a second emission, because the tilings change with it.
    Refused buffers are tried in decreasing order of saved traffic. After three attempts without gain the others stay in
    HBM, which bounds the compile time.
    """
    core = CORES[resident.emitted.placed.target.core]
    best, failed = resident, 0
    best_ns = expected_ns(best.body, core) if best.refused else 0.0
    while failed < min(_MOST_FAILURES, len(best.refused)):
        try:
            attempt = promote_to_sbuf(emit_kernels(resident.emitted.placed, best.kept + best.refused[failed]))
        except OutOfMemory:
            failed += 1
            continue
        ns = expected_ns(attempt.body, core)
        if ns < best_ns:
            best, best_ns = attempt, ns
        else:
            failed += 1
    return best


class _Survey:
    """Uses of buffers, and peak use of SBUF in each stage of a program. A stage consists of the steps of one node."""

    def __init__(self, body: Sequence[Step], emitters: Mapping[int, object]) -> None:
        self.uses: dict[int, _Use] = {}
        self.peaks: list[int] = []  # bytes per partition, by stage
        self.nodes: list[object] = []
        self._emitters = emitters
        self._visit(body, (), None)

    def _visit(self, body: Sequence[Step], counts: tuple[int, ...], loop: tuple[int, int] | None) -> None:
        for step in body:
            if isinstance(step, Loop) and any(id(inner) in self._emitters for inner in step.body):
                first = len(self.peaks)
                self._visit(step.body, (*counts, step.count), (first, first + self._stages(step.body) - 1))
                continue
            emitter = self._emitters.get(id(step), id(step))
            if not self.nodes or self.nodes[-1] != emitter:
                self.nodes.append(emitter)
                self.peaks.append(0)
            self._record(step, counts, loop)

    def bytes_of(self, candidate: _Candidate) -> Counter[object]:
        """The bytes per partition that a candidate occupies, for each node whose kernel runs during its live range."""
        return Counter(dict.fromkeys(self.nodes[candidate.live_range[0] : candidate.live_range[1] + 1], candidate.size))

    def _stages(self, body: Sequence[Step]) -> int:
        emitters = [self._emitters.get(id(step), id(step)) for step in body]
        return sum(number == 0 or emitter != emitters[number - 1] for number, emitter in enumerate(emitters))

    def _record(self, step: Step, counts: tuple[int, ...], loop: tuple[int, int] | None) -> None:
        if isinstance(step, Loop):
            for inner in step.body:
                self._record(inner, (*counts, step.count), loop)
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
        agreements = {view: _agreement(use, number, view, buffer.dtype) for view in _matrices(buffer)}
        promotable = [view for view, copies in agreements.items() if copies is not None]
        matrix = max(promotable, key=lambda view: agreements[view] or 0, default=None)
        if matrix is not None:
            size = len(buffer.names) * matrix.pitch * buffer.dtype.itemsize
            traffic = sum(
                prod(counts) * moved(place)
                for copy, counts in use.copies
                for place in copy.places.values()
                if isinstance(place, Far) and place.buffer == number
            )
            size = -(-size // _ALIGNMENT) * _ALIGNMENT
            if buffer.role is Role.SCRATCH:
                yield _Candidate(number, matrix, size, use.live_range, traffic)
            elif traffic > buffer.nbytes:  # a constant is loaded once, at the start, for all iterations of a repeat
                last = max(loop[1] if loop else stage for stage, loop in use.stages)
                yield _Candidate(number, matrix, size, (0, last), traffic - buffer.nbytes)


def _matrices(buffer: Buffer) -> Iterator[SbufMatrix]:
    """The views of a buffer as a matrix: first those whose rows fill all partitions, last the one that has the chunks
    of 128 elements that a transpose takes as its rows."""
    views = [
        SbufMatrix(prod(buffer.shape[:axis]), prod(buffer.shape[axis:])) for axis in range(len(buffer.shape), -1, -1)
    ]
    filled = [view for view in views if view.width > 1 and view.rows and not view.rows % PARTITIONS]
    yield from filled
    # A constant is loaded by one copy, which has whole blocks of rows.
    most = PARTITIONS if buffer.role is Role.CONSTANT else buffer.elements
    yield from (view for view in views if view not in filled and 0 < view.rows <= most and view.width)
    chunks, remainder = divmod(buffer.shape[-1] if buffer.shape else 0, PARTITIONS)
    if chunks > 1 and not remainder and 0 < buffer.elements // PARTITIONS <= most:
        yield SbufMatrix(buffer.elements // PARTITIONS, PARTITIONS)


def _agreement(use: _Use, number: int, matrix: SbufMatrix, dtype: DType) -> int | None:
    """How many copies of a buffer, counted with their loops, leave every element on its partition; None if a copy
    cannot be expressed in SBUF, with elements of the buffer's size."""
    places = [place for copy, _ in use.copies for place in copy.places.values()]
    accesses = [place for place in places if isinstance(place, Far) and place.buffer == number]
    if any(place.dtype.itemsize != dtype.itemsize for place in accesses):
        return None
    agreeing = 0
    for copy, counts in use.copies:
        moved_copies = sbuf_copy(copy, {number: matrix}, counts)
        if moved_copies is None:
            return None
        for part in moved_copies:
            sides = {(side.start, side.partitions) for side in part.places.values() if isinstance(side, Tile)}
            agreeing += prod(counts) * (len(part.places) == 2 and len(sides) == 1)
    return agreeing


def _are_expressible(use: _Use, homes: Mapping[int, SbufMatrix]) -> bool:
    return all(sbuf_copy(copy, homes, counts) is not None for copy, counts in use.copies)


def _find_address(
    candidate: _Candidate, peaks: Sequence[int], allocations: Sequence[tuple[_Candidate, int]], usable: int
) -> int | None:
    """The highest address that is free during the candidate's live range; None if there is none. Kernels allocate
    upwards from 0, so that the free space between stays contiguous."""
    first, last = candidate.live_range
    floor = max(peaks[first : last + 1])
    # The ranges may overlap one another, since their buffers need not be live at the same time. In descending order of
    # their ends, a gap above one range is above all that follow.
    occupied = sorted(
        (
            (address + other.size, address)
            for other, address in allocations
            if other.live_range[0] <= last and first <= other.live_range[1]
        ),
        reverse=True,
    )
    top = usable // _ALIGNMENT * _ALIGNMENT
    for high, low in occupied:
        if top - candidate.size >= high:
            break
        top = min(top, low)
    return top - candidate.size if top - candidate.size >= floor else None


class _Rewriter:
    """Rewrites steps for promoted buffers. `numbers` maps the buffers that remain in HBM to their new indices."""

    def __init__(self, homes: Mapping[int, SbufMatrix], table: Sequence[Buffer]) -> None:
        self._homes, self._table = homes, table
        remaining = [
            number for number, buffer in enumerate(table) if number not in homes or buffer.role is Role.CONSTANT
        ]
        self.numbers = {number: index for index, number in enumerate(remaining)}

    def loaded(self, number: int) -> Instruction:
        """The load of a promoted constant, at the start of the program."""
        home, buffer = self._homes[number], self._table[number]
        rows = buffer.elements // home.width
        lanes = min(rows, PARTITIONS)
        axes = (Axis(lanes, home.width), Axis(rows // lanes, home.block), Axis(home.width, 1))
        source = Far(number, buffer.dtype, Affine(), axes)
        tile = home.tile(source, ())
        assert tile is not None  # a candidate has whole blocks of rows
        return DmaCopy(engine=DMA_QUEUES[0], dst=tile, src=replace(source, buffer=self.numbers[number]))

    def steps(self, body: Sequence[Step], counts: tuple[int, ...]) -> Iterator[Step]:
        for step in body:
            if isinstance(step, Loop):
                yield Loop(step.count, tuple(self.steps(step.body, (*counts, step.count))))
                continue
            buffers = {place.buffer for place in step.places.values() if isinstance(place, Far)}
            if buffers.isdisjoint(self._homes):
                yield self._renumbered(step)
                continue
            copies = sbuf_copy(step, self._homes, counts)
            assert copies is not None  # `_is_promotable` has checked every copy
            yield from map(self._renumbered, copies)

    def _renumbered(self, step: Instruction) -> Instruction:
        hbm_places = {name: place for name, place in step.places.items() if isinstance(place, Far)}
        changed = {name: replace(place, buffer=self.numbers[place.buffer]) for name, place in hbm_places.items()}
        return step.with_fields(**changed) if changed else step
