"""Profile of a program: its predicted time by operator and module, the gaps of its busiest engine, its transfers.

Every sum is over all executions: the busy times and the gaps of an engine add up to the program's time, and so do the
shares of the critical path. docs/reference/profile.md defines the terms.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Final

from nxpipe.emulator.analysis.execution_trace import DMA, LATENCY, Event, ExecutionTrace, nanoseconds, record
from nxpipe.emulator.analysis.memory_use import MemoryUse, memory_use
from nxpipe.emulator.analysis.utilization import Utilisation, hbm_gb_s, utilisation
from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.isa.cost import moved, run_bytes, transfer_bytes
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, SourcePosition, Step, instructions, within
from nxpipe.emulator.isa.tensor import Matmul

NO_OPERATOR: Final = "-"
NO_MODULE: Final = "(program)"


class NotProfiled(CompileError):
    """A program whose timeline takes too long to compute."""


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """What a node is called: its module, with all layers of a loop in one name, and its operator."""

    module: str
    operator: str


@dataclass
class PathShare:
    """The part of a program that some of its nodes take, in ps by resource; bytes are those of HBM, read and written.
    `path` is what they have of the critical path. `busy` counts each DMA queue, so that `dma` may exceed the program's
    time."""

    path: Counter[str] = field(default_factory=Counter)
    busy: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    spilled: int = 0
    multiply_adds: int = 0

    def add(self, other: "PathShare") -> None:
        self.path.update(other.path)
        self.busy.update(other.busy)
        self.nbytes += other.nbytes
        self.spilled += other.spilled
        self.multiply_adds += other.multiply_adds

    @property
    def on_path(self) -> int:
        return self.path.total()

    @property
    def bound_by(self) -> str | None:
        """The resource with the largest share of the critical path, else the busiest one."""
        times = self.path if self.on_path else self.busy
        return max(sorted(times), key=lambda resource: times[resource], default=None)

    def document(self) -> dict[str, Any]:
        return {
            "bound_by": self.bound_by,
            "critical_path_ns": _in_ns(self.path),
            "busy_ns": _in_ns(self.busy),
            "hbm_bytes": self.nbytes,
            "spilled_bytes": self.spilled,
            "multiply_adds": self.multiply_adds,
        }


@dataclass(frozen=True, order=True, slots=True)
class GapReason:
    """Why an engine idles: the resource that it waits for, and its work."""

    resource: str
    work: str
    place: Place


@dataclass(frozen=True, slots=True)
class SizeBin:
    """Transfers of at least `least` bytes, and of less than twice as many: how many are executed, and their bytes."""

    least: int
    transfers: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Profile:
    """The profile of a program. `busy` has each engine and queue, and `dma`, the time in which any queue moves bytes.
    `gaps` are those of `busiest`."""

    program: Program
    trace: ExecutionTrace
    utilisation: Utilisation
    places: tuple[Place, ...]  # of each instruction in the text
    shares: dict[Place, PathShare]
    busy: dict[str, int]
    gaps: dict[GapReason, int]
    memory: MemoryUse | None

    @property
    def latency_ps(self) -> int:
        return self.trace.latency_ps

    @property
    def busiest(self) -> str:
        """The engine that is busy for the longest time."""
        return _busiest(self.busy)

    @cached_property
    def whole(self) -> PathShare:
        return _sum(self.shares.values())

    @cached_property
    def by_operator(self) -> dict[str, PathShare]:
        """The largest share of the critical path first."""
        return _grouped((place.operator, share) for place, share in self.shares.items())

    @cached_property
    def by_module(self) -> dict[str, PathShare]:
        return _grouped((place.module, share) for place, share in self.shares.items())

    def tree(self) -> Iterator[tuple[int, str, PathShare]]:
        """All modules with their depth; a module is followed by those inside it, and its share includes theirs."""
        sums: dict[tuple[str, ...], PathShare] = defaultdict(PathShare)
        for name, share in self.by_module.items():
            path = tuple(name.split("."))
            for depth in range(len(path)):
                sums[path[: depth + 1]].add(share)
        yield from self._below((), sums)

    def _below(
        self, path: tuple[str, ...], sums: dict[tuple[str, ...], PathShare]
    ) -> Iterator[tuple[int, str, PathShare]]:
        inside = [other for other in sums if other[:-1] == path]
        for child in sorted(inside, key=lambda other: (-sums[other].on_path, other)):
            yield len(path), ".".join(child), sums[child]
            yield from self._below(child, sums)

    def run_sizes(self) -> list[SizeBin]:
        """The transfers by the bytes of a descriptor, which is a contiguous run."""
        return _binned((run_bytes(each), count, transfer_bytes(each)) for each, count in self._transfers())

    def transfer_sizes(self) -> list[SizeBin]:
        return _binned((transfer_bytes(each), count, transfer_bytes(each)) for each, count in self._transfers())

    def _transfers(self) -> Iterator[tuple[Instruction, int]]:
        for instruction, counts in within(self.program.body):
            if instruction.engine in DMA_QUEUES and all(counts):
                yield instruction, prod(counts)

    @property
    def rates(self) -> dict[str, float]:
        """The roofs: operations per ns of a whole tensor engine in 16 bits and in fp32, and bytes per ns."""
        core = CORES[self.program.core]
        peak = 2 * core.pe_rows * core.pe_cols * core.tensor_ghz
        dma = core.dma_engines * core.dma_engine_peak_gb_s
        return {
            "flops": peak,
            "flops_fp32": peak / core.fp32_cycle_factor,
            "hbm": hbm_gb_s(core.name),
            "dma": dma,
        }

    def document(self) -> dict[str, Any]:
        """Plain data in a stable order."""
        used = self.utilisation
        return {
            "core": self.program.core,
            "ranks": self.program.ranks,
            "this_program": {
                "latency_ns": nanoseconds(self.latency_ps),
                "bound_by": self.whole.bound_by,
                "floors_ns": {name: round(ns, 1) for name, ns in sorted(used.floors_ns.items())},
                "over_floor": None if used.over_floor is None else round(used.over_floor, 4),
            },
            "busiest": self.busiest,
            "busy_ns": _in_ns(self.busy),
            "total": self.whole.document(),
            "operators": {name: share.document() for name, share in self.by_operator.items()},
            "modules": {name: share.document() for name, share in self.by_module.items()},
            "gaps": [
                {
                    "resource": reason.resource,
                    "work": reason.work,
                    "module": reason.place.module,
                    "operator": reason.place.operator,
                    "ns": nanoseconds(ps),
                }
                for reason, ps in self.gaps.items()
            ],
            "dma": {
                "descriptors": [_bin_document(each) for each in self.run_sizes()],
                "transfers": [_bin_document(each) for each in self.transfer_sizes()],
            },
            "memory": self.memory.document() if self.memory else None,
            "rates_per_ns": {name: round(rate, 3) for name, rate in self.rates.items()},
        }


def profile(program: Program) -> Profile:
    """The profile of a legal program; NotProfiled if its timeline exceeds the step limit."""
    trace = record(program)
    if trace is None:
        raise NotProfiled("the program executes too many instructions for its timeline; profile a smaller bucket")
    places = _places(program)
    busy = _busy(trace)
    return Profile(
        program=program,
        trace=trace,
        utilisation=utilisation(program, trace),
        places=places,
        shares=_shares(trace, places),
        busy=busy,
        gaps=_gaps(trace, places, _busiest(busy)) if busy else {},
        memory=memory_use(trace),
    )


# Names


def _places(program: Program) -> tuple[Place, ...]:
    """The place of each instruction in the text. Modules of a loop over layers are named once for all of them."""
    places: list[Place] = []
    for step in program.body:
        series = _layers(step, program.buffers) if isinstance(step, Loop) else {}
        for instruction in instructions((step,)):
            note = program.notes[instruction.note] if instruction.note < len(program.notes) else ""
            position = SourcePosition.of(note)
            module = _renamed(position.module, series) or NO_MODULE
            places.append(Place(module, position.operator or NO_OPERATOR))
    return tuple(places)


def _layers(loop: Step, buffers: Sequence[Buffer]) -> dict[tuple[str, ...], str]:
    """For the modules that a loop repeats, the path of the first of them, and the name that stands for all.

    The weights that the iterations read are one buffer; their names differ in the number of the layer."""
    found: dict[tuple[str, ...], str] = {}
    for instruction in instructions((loop,)):
        for place in instruction.places.values():
            if isinstance(place, Far) and buffers[place.buffer].role is Role.PARAMETER:
                found.update(_layer_series(buffers[place.buffer].names))
    return found


def _layer_series(names: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    paths = [name.split(".") for name in names]
    if len(names) < 2 or len({len(path) for path in paths}) > 1:
        return
    varying = [depth for depth, parts in enumerate(zip(*paths, strict=True)) if len(set(parts)) > 1]
    if len(varying) == 1 and all(path[varying[0]].isdecimal() for path in paths):
        (depth,) = varying
        numbers = [int(path[depth]) for path in paths]
        step = numbers[1] - numbers[0]
        by = "" if step == 1 else f" by {step}"
        yield tuple(paths[0][: depth + 1]), f"[{numbers[0]}-{numbers[-1]}{by}]"


def _renamed(module: str, series: dict[tuple[str, ...], str]) -> str:
    parts = module.split(".")
    for depth in range(len(parts), 0, -1):
        if name := series.get(tuple(parts[:depth])):
            return ".".join([*parts[: depth - 1], name, *parts[depth:]])
    return module


# Sums


def _shares(trace: ExecutionTrace, places: Sequence[Place]) -> dict[Place, PathShare]:
    shares: dict[Place, PathShare] = defaultdict(PathShare)
    taken = trace.weighted(trace.ends) - trace.weighted(trace.begins)
    for event, ps in zip(trace.events, taken.tolist(), strict=True):
        shares[places[event.number]].busy[_resource(event.engine)] += ps
    for segment in trace.critical_path:
        event = trace.events[segment.event]
        for resource, low, high in event.parts(segment.low, segment.high):
            shares[places[event.number]].path[resource] += segment.times * (high - low)
    buffers = trace.program.buffers
    for (instruction, counts), place in zip(within(trace.program.body), places, strict=True):
        share, times = shares[place], prod(counts)
        for far in (*instruction.read(), *instruction.written()):
            if isinstance(far, Far):
                share.nbytes += times * moved(far)
                share.spilled += times * moved(far) * (buffers[far.buffer].role is Role.SCRATCH)
        if isinstance(instruction, Matmul):
            products = instruction.stationary.partitions * instruction.stationary.elements * instruction.moving.elements
            share.multiply_adds += times * products
    return dict(shares)


def _resource(engine: Engine) -> str:
    return DMA if engine in DMA_QUEUES else engine.value


def _sum(shares: Iterable[PathShare]) -> PathShare:
    total = PathShare()
    for share in shares:
        total.add(share)
    return total


def _grouped(shares: Iterable[tuple[str, PathShare]]) -> dict[str, PathShare]:
    groups: dict[str, PathShare] = defaultdict(PathShare)
    for name, share in shares:
        groups[name].add(share)
    return dict(sorted(groups.items(), key=lambda item: (-item[1].on_path, item[0])))


def _busy(trace: ExecutionTrace) -> dict[str, int]:
    """The busy time of each engine and queue, and of all queues together."""
    busy: dict[str, int] = {
        engine.value: sum(trace.weight(trace.events[n].begin, trace.events[n].end) for n in numbers)
        for engine, numbers in trace.by_engine.items()
    }
    if transfers := _work_of(trace, DMA):
        busy[DMA] = sum(trace.weight(low, high) for low, high, _ in transfers)
    return dict(sorted(busy.items()))


def _busiest(busy: dict[str, int]) -> str:
    """All DMA queues are one engine here."""
    engines = [name for name in sorted(busy) if name == DMA or Engine(name) not in DMA_QUEUES]
    return max(engines, key=lambda name: busy[name], default="")


def _work_of(trace: ExecutionTrace, name: str) -> list[tuple[int, int, int]]:
    """The intervals in which an engine works, each with the event that begins it; of DMA, those in which any queue
    moves bytes."""
    if name != DMA:
        numbers = trace.by_engine[Engine(name)]
        return [(trace.events[number].begin, trace.events[number].end, number) for number in numbers]
    queues = [number for queue in DMA_QUEUES for number in trace.by_engine.get(queue, ())]
    moves = sorted((trace.events[number].transfers, trace.events[number].end, number) for number in queues)
    united: list[tuple[int, int, int]] = []
    for low, high, number in moves:
        if united and low <= united[-1][1]:
            united[-1] = (united[-1][0], max(high, united[-1][1]), united[-1][2])
        else:
            united.append((low, high, number))
    return united


# Gaps


def _gaps(trace: ExecutionTrace, places: Sequence[Place], busiest: str) -> dict[GapReason, int]:
    """What an engine waits for while it idles, the longest first: the critical path before the work that ends each
    gap."""
    sums = Counter[GapReason]()
    idle_from = 0
    for low, high, number in _work_of(trace, busiest):
        for event, begin, end in _before(trace, number, idle_from, low):
            _add_gap(sums, trace, places, event, begin, end)
        idle_from = high
    if idle_from < trace.end:
        last = max(range(len(trace.events)), key=lambda number: trace.events[number].end)
        for event, begin, end in _before(trace, last, idle_from, trace.end):
            _add_gap(sums, trace, places, event, begin, end)
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _before(trace: ExecutionTrace, number: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The events, with their parts, that fill the gap from `low` to `high` at which an event begins its work."""
    if low >= high:
        return
    begin = max(trace.events[number].begin, low)
    if begin < high:
        yield number, begin, high
    if trace.events[number].begin > low:
        yield from trace.back(number, low)


def _add_gap(
    sums: Counter[GapReason], trace: ExecutionTrace, places: Sequence[Place], number: int, low: int, high: int
) -> None:
    event = trace.events[number]
    place = places[event.number]
    for resource, begin, end in event.parts(low, high):
        sums[GapReason(resource, _work(trace, event, resource), place)] += trace.weight(begin, end)


def _work(trace: ExecutionTrace, event: Event, resource: str) -> str:
    """What an instruction does, for the reason of a gap."""
    instruction = trace.instruction(event)
    if event.engine not in DMA_QUEUES:
        return instruction.name
    buffers = trace.program.buffers
    read, written = (
        [buffers[place.buffer].role for place in places if isinstance(place, Far)]
        for places in (instruction.read(), instruction.written())
    )
    move = {(True, False): "load", (False, True): "store"}.get((bool(read), bool(written)), "copy")
    subject = f" of {(read or written)[0]}" if read or written else ""
    return f"start-up of a {move}" if resource == LATENCY else f"{move}{subject}"


def _binned(transfers: Iterable[tuple[int, int, int]]) -> list[SizeBin]:
    """Bins by powers of two: of (size, executions, bytes of each)."""
    counts, totals = Counter[int](), Counter[int]()
    for size, times, nbytes in transfers:
        least = 1 << max(size.bit_length() - 1, 0)
        counts[least] += times
        totals[least] += times * nbytes
    return [SizeBin(least, counts[least], totals[least]) for least in sorted(counts)]


def _bin_document(each: SizeBin) -> dict[str, int]:
    return {"at_least_bytes": each.least, "transfers": each.transfers, "bytes": each.nbytes}


def _in_ns(times: Counter[str] | dict[str, int]) -> dict[str, float]:
    return {name: nanoseconds(ps) for name, ps in sorted(times.items())}
