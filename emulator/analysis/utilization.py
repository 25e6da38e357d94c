"""Utilization of a program: instructions, busy time and bytes, multiplied by the loop counts around each instruction.

`totals` counts the bytes that instructions move. `buffer_traffic` counts the distinct bytes of each buffer: a lower
bound on the traffic of any program for the same task.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nxpipe.emulator.analysis.execution_trace import DMA, ExecutionTrace, nanoseconds, record
from nxpipe.emulator.analysis.program_memory import ProgramMemory, footprint, writers
from nxpipe.emulator.executable.code import write_code
from nxpipe.emulator.hardware import CORES, INSTANCES, CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cost import cost, moved, share_of_dma
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Place, Tile
from nxpipe.emulator.isa.program import Buffer, Program, Role, within
from nxpipe.emulator.isa.tensor import Matmul

HBM: Final = "hbm"


@dataclass
class Totals:
    """Counts by (engine, kind of instruction), and bytes by memory. `ns` is the busy time of each engine; DMA queues
    share the DMA engines, whose busy time is at least `dma_ns`. `ideal_cycles` are the cycles of the program's
    multiplications on a tensor engine that uses every row and column in every cycle."""

    static_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    executed_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    ns: dict[str, float] = field(default_factory=dict)
    dma_ns: float = 0.0
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    multiply_adds: int = 0
    tensor_cycles: float = 0.0
    ideal_cycles: float = 0.0

    @property
    def static(self) -> int:
        return self.static_counts.total()

    @property
    def engines(self) -> Counter[str]:
        return _summed({engine: count} for (engine, _), count in self.executed_counts.items())

    @property
    def kinds(self) -> Counter[str]:
        return _summed({kind: count} for (_, kind), count in self.executed_counts.items())

    @property
    def utilisation(self) -> float | None:
        """Utilization of the tensor engine while it is busy; None without work."""
        return self.ideal_cycles / self.tensor_cycles if self.tensor_cycles else None

    def document(self) -> dict[str, object]:
        """The totals as a JSON document, in a stable order."""
        return {
            "static_instructions": self.static,
            "instructions": self.executed_counts.total(),
            "by_engine": dict(sorted(self.engines.items())),
            "by_kind": dict(sorted(self.kinds.items())),
            "busy_ns": {engine: round(ns, 1) for engine, ns in sorted(self.ns.items())},
            "bytes_read": dict(sorted(self.read.items())),
            "bytes_written": dict(sorted(self.written.items())),
            "multiply_adds": self.multiply_adds,
            "tensor_cycles": round(self.tensor_cycles, 1),
            "ideal_tensor_cycles": round(self.ideal_cycles, 1),
            "tensor_utilisation": None if self.utilisation is None else round(self.utilisation, 4),
        }


def totals(program: Program) -> Totals:
    core, result = CORES[program.core], Totals()
    for instruction, counts in within(program.body):
        _add(result, instruction, counts, core)
    return result


def _add(totals: Totals, instruction: Instruction, counts: tuple[int, ...], core: CoreSpec) -> None:
    times = prod(counts)
    instruction_cost = cost(instruction, core)
    engine = instruction.engine.value
    totals.static_counts[engine, instruction.name] += 1
    totals.executed_counts[engine, instruction.name] += times
    totals.ns[engine] = totals.ns.get(engine, 0.0) + times * instruction_cost.ns
    if instruction.engine in DMA_QUEUES:
        totals.dma_ns += times * instruction_cost.ns * share_of_dma(instruction, core)
    for place in instruction.written():
        totals.written[_level(place)] += times * moved(place)
    for place in instruction.read():
        totals.read[_level(place)] += times * moved(place)
    if isinstance(instruction, Matmul):
        _add_products(totals, instruction, times, core)
        # A matmul that begins a sum does not read `dst`; subtract the reads counted above.
        if instruction.reads_of_dst():
            totals.read[_level(instruction.dst)] -= _first(instruction.accumulate, counts) * moved(instruction.dst)
    if instruction_cost.cycles is not None and engine == "tensor":
        totals.tensor_cycles += times * instruction_cost.cycles


def _add_products(totals: Totals, matmul: Matmul, times: int, core: CoreSpec) -> None:
    products = matmul.stationary.partitions * matmul.stationary.elements * matmul.moving.elements
    cycle_factor = core.fp32_cycle_factor if DType.FLOAT32 in (matmul.stationary.dtype, matmul.moving.dtype) else 1
    totals.multiply_adds += times * products
    totals.ideal_cycles += times * cycle_factor * products / (core.pe_rows * core.pe_cols)


def _first(accumulate: Affine, counts: tuple[int, ...]) -> int:
    """The number of iterations in which `accumulate` is 0, so that the matmul begins a sum: the first iteration of the
    loops that it depends on. An expression that does not count up from 0 is assumed to be always above 0."""
    if accumulate.bounds(counts)[0] != 0 or accumulate.rotations or accumulate.base:
        return prod(counts) if accumulate.bounds(counts)[1] <= 0 else 0
    iterations = prod(counts[depth] for depth, _ in accumulate.terms)
    return prod(counts) // iterations if iterations else 0


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for counter in counts:
        total.update(counter)
    return total


def _level(place: Place) -> str:
    return place.memory.value if isinstance(place, Tile) else HBM


_MOST_GRAINS: Final = 1 << 22  # grains of one buffer up to which bytes are counted exactly


@dataclass(frozen=True, slots=True)
class BufferTraffic:
    """Distinct bytes of a buffer. A read of bytes that the program has written before does not count."""

    read: int = 0
    written: int = 0


def buffer_traffic(program: Program) -> list[BufferTraffic]:
    """The traffic of each buffer. Indexed rows count at each read, up to the size of the buffer."""
    uses: list[list[_Use]] = [[] for _ in program.buffers]
    for instruction, counts in within(program.body):
        for far, written in _ends(instruction):
            if all(counts) and far.elements:
                uses[far.buffer].append(_use(far, counts, written))
    return [_touched(buffer, buffer_uses) for buffer, buffer_uses in zip(program.buffers, uses, strict=True)]


@dataclass(frozen=True, slots=True)
class _Use:
    """An access to a buffer: `run` bytes at `start`, repeated along each axis; or `by_number` bytes of indexed rows."""

    written: bool
    start: int = 0
    run: int = 0
    axes: tuple[Axis, ...] = ()
    by_number: int = 0

    @property
    def nbytes(self) -> int:
        return self.run * prod(axis.size for axis in self.axes)

    def grains(self, grain: int) -> NDArray[Any]:
        positions = np.arange(self.start // grain, (self.start + self.run) // grain)
        for axis in self.axes:
            steps = np.arange(axis.size) * (axis.stride // grain)
            positions = (steps[:, None] + positions).ravel()
        return positions


def _ends(instruction: Instruction) -> Iterator[tuple[Far, bool]]:
    yield from ((place, False) for place in instruction.read() if isinstance(place, Far))
    yield from ((place, True) for place in instruction.written() if isinstance(place, Far))


def _use(far: Far, counts: Sequence[int], written: bool) -> _Use:
    """The use of a buffer by an operand; enclosing loops become axes of the access."""
    size = far.dtype.itemsize
    if far.rows is not None:
        elements = prod(axis.size for axis in far.axes if axis.stride)
        return _Use(written, by_number=elements * prod(counts) * size)
    axes = [*far.axes, *(Axis(counts[depth], step) for depth, step in far.offset.terms)]
    axes += [Axis(rotation.count, rotation.step) for rotation in far.offset.rotations]
    start = far.offset.base + sum((axis.size - 1) * min(axis.stride, 0) for axis in axes)
    run = 1
    separate: list[Axis] = []
    for stride, count in sorted((abs(axis.stride), axis.size) for axis in axes if axis.stride and axis.size > 1):
        if stride <= run and not separate:
            run += (count - 1) * stride
        else:
            separate.append(Axis(count, stride * size))
    return _Use(written, start * size, run * size, tuple(separate))


def _touched(buffer: Buffer, uses: Sequence[_Use]) -> BufferTraffic:
    plain = [use for use in uses if use.run]
    grain = gcd(buffer.nbytes, *(number for use in plain for number in (use.start, use.run, *_strides(use))))
    grains = buffer.nbytes // grain if grain else 0
    if grains > _MOST_GRAINS or any(use.nbytes // grain > _MOST_GRAINS for use in plain):
        read, written = (_at_most(buffer, uses, writing) for writing in (False, True))
        return BufferTraffic(read, written)
    fresh, stored = np.zeros(grains, bool), np.zeros(grains, bool)
    scattered = known = 0  # bytes of indexed rows written so far, and those written before the last read
    for use in uses:
        if use.written:
            scattered += use.by_number
            stored[use.grains(grain)] = True
        elif use.run:
            at = use.grains(grain)
            fresh[at] |= ~stored[at]
            known = scattered
    gathered = sum(use.by_number for use in uses if not use.written)
    read = max(int(fresh.sum()) * grain - known, 0) + gathered
    return BufferTraffic(min(read, buffer.nbytes), min(int(stored.sum()) * grain + scattered, buffer.nbytes))


def _strides(use: _Use) -> Iterable[int]:
    return (axis.stride for axis in use.axes)


def _at_most(buffer: Buffer, uses: Sequence[_Use], written: bool) -> int:
    """An upper bound for buffers with too many grains to count: distinct uses count as disjoint."""
    return min(buffer.nbytes, sum(use.nbytes + use.by_number for use in set(uses) if use.written is written))


_NAMED: Final = 10
_READ: Final = (Role.PARAMETER, Role.CONSTANT, Role.INPUT, Role.STATE)
_WRITTEN: Final = (Role.OUTPUT, Role.STATE)


@dataclass(frozen=True)
class Spill:
    """Bytes that a module writes to scratch in HBM and that are read back within the run."""

    module: str
    written: int
    read: int

    @property
    def moved(self) -> int:
        return self.written + self.read

    def document(self) -> dict[str, object]:
        return {"module": self.module, "bytes_written": self.written, "bytes_read": self.read}


@dataclass(frozen=True)
class Utilisation:
    """The utilization of a program. `compulsory`: by role, the bytes that any program of the task must move, each once:
    reads of weights, constants, inputs and states, writes of outputs and states. `busy_ns`: by engine. `latency_ns`: of
    the whole program, and `critical_path` its parts by resource; None if the simulation takes too long. `spills`: the
    largest first."""

    core: str
    totals: Totals
    compulsory: Mapping[Role, int]
    busy_ns: Mapping[str, float]
    latency_ns: float | None
    critical_path: Mapping[str, float] | None
    spills: tuple[Spill, ...]
    footprint: ProgramMemory
    code: int  # bytes of code in the executable

    @property
    def traffic(self) -> int:
        """Bytes of HBM read and written."""
        return self.totals.read[HBM] + self.totals.written[HBM]

    @property
    def ratio(self) -> float | None:
        """HBM traffic divided by compulsory traffic; None if there is no compulsory traffic."""
        least = sum(self.compulsory.values())
        return self.traffic / least if least else None

    @property
    def bound(self) -> str | None:
        """The busiest engine; None if no engine is busy."""
        return max(self.busy_ns, key=lambda engine: self.busy_ns[engine], default=None)

    @property
    def bound_by(self) -> str | None:
        """The resource with the largest share of the critical path."""
        path = self.critical_path or {}
        return max(path, key=lambda resource: path[resource], default=None)

    @property
    def floors_ns(self) -> Mapping[str, float]:
        """The times that no program of the task undercuts: its compulsory bytes at the HBM rate of a core, and its
        multiplications on a tensor engine that uses every row and column."""
        hbm = sum(self.compulsory.values()) / hbm_gb_s(self.core)
        return {HBM: hbm, "tensor": self.totals.ideal_cycles / CORES[self.core].tensor_ghz}

    @property
    def over_floor(self) -> float | None:
        """The predicted time as a multiple of the larger floor."""
        floor = max(self.floors_ns.values())
        return self.latency_ns / floor if self.latency_ns and floor else None

    @property
    def spilled(self) -> int:
        return sum(spill.moved for spill in self.spills)

    def document(self) -> dict[str, Any]:
        """Plain data for a report, in a stable order."""
        total = self.totals
        return {
            "bytes": {
                memory: {"read": total.read[memory], "written": total.written[memory]}
                for memory in sorted(total.read | total.written)
            },
            "footprint": {"code": self.code, **self.footprint.document()},
            "hbm": {
                "compulsory": {str(role): nbytes for role, nbytes in sorted(self.compulsory.items())},
                "compulsory_bytes": sum(self.compulsory.values()),
                "moved_bytes": self.traffic,
                "ratio": _rounded(self.ratio),
            },
            "instructions": self._instructions(),
            "spilled": self._spilled(),
            "tensor_engine": {
                "busy_cycles": round(total.tensor_cycles, 1),
                "ideal_cycles": round(total.ideal_cycles, 1),
                "multiply_adds": total.multiply_adds,
                "utilisation": _rounded(total.utilisation),
            },
            "time": {
                "bound_by": self.bound,
                "busy_ns": {engine: round(ns, 1) for engine, ns in sorted(self.busy_ns.items())},
                "critical_path_ns": {name: round(ns, 1) for name, ns in sorted((self.critical_path or {}).items())},
                "floors_ns": {name: round(ns, 1) for name, ns in sorted(self.floors_ns.items())},
                "latency_ns": None if self.latency_ns is None else round(self.latency_ns, 1),
                "limited_by": self.bound_by,
                "over_floor": _rounded(self.over_floor),
            },
        }

    def sentence(self) -> str:
        """One line for a terminal."""
        parts = [f"{_size(self.traffic)} of HBM read and written"]
        if self.ratio is not None:
            parts[0] += f", {self.ratio:.2f} x what must move"  # stored in artifacts, so the words stay
        parts.append(f"{_size(self.spilled)} of it spilled and read back")
        if self.totals.utilisation is not None:
            parts.append(f"the tensor engine {self.totals.utilisation:.0%} used while busy")
        return "; ".join([*parts, *self._timing()])

    def _timing(self) -> Iterator[str]:
        """The predicted time, what bounds it, and its distance from the floor."""
        if self.latency_ns and self.critical_path and self.bound_by:
            share = self.critical_path[self.bound_by] / self.latency_ns
            predicted = f"this program: {self.latency_ns / 1e6:.2f} ms predicted"
            yield f"{predicted}, bound by {self.bound_by} for {share:.0%} of it"
            if self.over_floor:
                yield f"{self.over_floor:.1f} x its floor"
        elif self.bound is not None:
            yield f"bound by {self.bound} at {self.busy_ns[self.bound] / 1e6:.2f} ms"

    def _instructions(self) -> dict[str, object]:
        """Counts by engine (each DMA queue separately) and kind of instruction."""
        total = self.totals
        by_engine: dict[str, dict[str, object]] = {}
        for (engine, kind), static in sorted(total.static_counts.items()):
            executed = total.executed_counts[engine, kind]
            by_engine.setdefault(engine, {})[kind] = {"carried_out": executed, "static": static}
        return {"by_engine": by_engine, "carried_out": total.executed_counts.total(), "static": total.static}

    def _spilled(self) -> dict[str, object]:
        others = self.spills[_NAMED:]
        return {
            "bytes": self.spilled,
            "largest": [spill.document() for spill in self.spills[:_NAMED]],
            "rest": {"modules": len(others), "bytes": sum(spill.moved for spill in others)},
        }


def hbm_gb_s(core: str) -> float:
    """The share of a core in the HBM rate of its chip; of the fastest instance type with such cores."""
    return max(each.device_memory_gb_s / each.cores for each in INSTANCES.values() if each.core == core)


def utilisation(program: Program, trace: ExecutionTrace | None = None) -> Utilisation:
    """The utilization of a legal program; `trace` is its execution trace, if it has been recorded."""
    total, trace = totals(program), trace or record(program)
    path = {name: nanoseconds(ps) for name, ps in trace.path_by_resource.items()} if trace else None
    return Utilisation(
        core=program.core,
        totals=total,
        compulsory=_compulsory(program),
        busy_ns=busy(total),
        latency_ns=nanoseconds(trace.latency_ps) if trace else None,
        critical_path=path,
        spills=_spills(program),
        footprint=footprint(program),
        code=len(write_code(program.body)),
    )


def _compulsory(program: Program) -> dict[Role, int]:
    least = dict.fromkeys((*_READ, Role.OUTPUT), 0)
    for buffer, traffic in zip(program.buffers, buffer_traffic(program), strict=True):
        least[buffer.role] = least.get(buffer.role, 0)
        least[buffer.role] += traffic.read * (buffer.role in _READ) + traffic.written * (buffer.role in _WRITTEN)
    return {role: nbytes for role, nbytes in least.items() if role is not Role.SCRATCH}


def busy(total: Totals) -> dict[str, float]:
    """The busy time of each engine. DMA is bound by its busiest queue, and by the DMA engines that all queues share."""
    busy = {engine: ns for engine, ns in total.ns.items() if Engine(engine) not in DMA_QUEUES}
    queues = [ns for engine, ns in total.ns.items() if Engine(engine) in DMA_QUEUES]
    return {**busy, DMA: max(*queues, total.dma_ns)} if queues else busy


def _spills(program: Program) -> tuple[Spill, ...]:
    written, read = [0] * len(program.buffers), [0] * len(program.buffers)
    for instruction, counts in within(program.body):
        for places, nbytes in ((instruction.written(), written), (instruction.read(), read)):
            for place in places:
                if isinstance(place, Far):
                    nbytes[place.buffer] += prod(counts) * moved(place)
    origins = writers(program)
    sums: dict[str, Spill] = {}
    for number, buffer in enumerate(program.buffers):
        if buffer.role is Role.SCRATCH and written[number] and read[number]:
            name = origins[number]
            before = sums.get(name, Spill(name, 0, 0))
            sums[name] = Spill(name, before.written + written[number], before.read + read[number])
    return tuple(sorted(sums.values(), key=lambda spill: (-spill.moved, spill.module)))


def _rounded(ratio: float | None) -> float | None:
    return None if ratio is None else round(ratio, 4)


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
