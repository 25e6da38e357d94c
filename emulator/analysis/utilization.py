"""Utilization: how well a legal program uses the machine, worked out without running it.

It compares the HBM traffic with the compulsory traffic, and counts busy time of engines, spills and memory. Times are
documented costs: an engine is busy while it can start no other instruction, so that no run is shorter than the busiest
engine. `schedule.timeline` estimates the latency.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from nxpipe.emulator.analysis.program_memory import ProgramMemory, footprint, writers
from nxpipe.emulator.executable.code import write_code
from nxpipe.emulator.isa.cost import moved
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Program, Role, within
from nxpipe.emulator.isa.totals import HBM, Totals, buffer_traffic, totals
from nxpipe.emulator.schedule.timeline import latency_ns

DMA: Final = "dma"  # all queues together, for they share their engines
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
    """`compulsory`: for each role the bytes that any program of the task moves, each once: reads of weights, constants,
    inputs and states, writes of outputs and states. `busy_ns`: by engine. `latency_ns`: of all engines together; None
    where simulating it takes too long. `spills`: the largest first."""

    totals: Totals
    compulsory: Mapping[Role, int]
    busy_ns: Mapping[str, float]
    latency_ns: float | None
    spills: tuple[Spill, ...]
    footprint: ProgramMemory
    code: int  # bytes, as an executable holds it

    @property
    def traffic(self) -> int:
        """Bytes of HBM read and written."""
        return self.totals.read[HBM] + self.totals.written[HBM]

    @property
    def ratio(self) -> float | None:
        """HBM traffic divided by compulsory traffic; None where nothing is compulsory."""
        least = sum(self.compulsory.values())
        return self.traffic / least if least else None

    @property
    def bound(self) -> str | None:
        """The busiest engine; None where none is busy."""
        return max(self.busy_ns, key=lambda engine: self.busy_ns[engine], default=None)

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
                "latency_ns": None if self.latency_ns is None else round(self.latency_ns, 1),
            },
        }

    def sentence(self) -> str:
        """One line for a terminal."""
        parts = [f"{_size(self.traffic)} of HBM read and written"]
        if self.ratio is not None:
            parts[0] += f", {self.ratio:.2f} x what must move"
        parts.append(f"{_size(self.spilled)} of it spilled and read back")
        if self.totals.utilisation is not None:
            parts.append(f"the tensor engine {self.totals.utilisation:.0%} used while busy")
        if self.latency_ns:
            parts.append(f"{self.latency_ns / 1e6:.2f} ms predicted")
        if self.bound is not None:
            parts.append(f"bound by {self.bound} at {self.busy_ns[self.bound] / 1e6:.2f} ms")
        return "; ".join(parts)

    def _instructions(self) -> dict[str, object]:
        """Counts by engine, each DMA queue by itself, and by kind."""
        total = self.totals
        by_engine: dict[str, dict[str, object]] = {}
        for (engine, kind), static in sorted(total.written_down.items()):
            done = total.carried_out[engine, kind]
            by_engine.setdefault(engine, {})[kind] = {"carried_out": done, "static": static}
        return {"by_engine": by_engine, "carried_out": total.carried_out.total(), "static": total.static}

    def _spilled(self) -> dict[str, object]:
        rest = self.spills[_NAMED:]
        return {
            "bytes": self.spilled,
            "largest": [spill.document() for spill in self.spills[:_NAMED]],
            "rest": {"modules": len(rest), "bytes": sum(spill.moved for spill in rest)},
        }


def utilisation(program: Program) -> Utilisation:
    total = totals(program)
    return Utilisation(
        totals=total,
        compulsory=_compulsory(program),
        busy_ns=_busy(total),
        latency_ns=latency_ns(program),
        spills=_spills(program),
        footprint=footprint(program),
        code=len(write_code(program.body)),
    )


def _compulsory(program: Program) -> dict[Role, int]:
    least = dict.fromkeys((*_READ, Role.OUTPUT), 0)
    for buffer, found in zip(program.buffers, buffer_traffic(program), strict=True):
        least[buffer.role] = least.get(buffer.role, 0)
        least[buffer.role] += found.read * (buffer.role in _READ) + found.written * (buffer.role in _WRITTEN)
    return {role: nbytes for role, nbytes in least.items() if role is not Role.SCRATCH}


def _busy(total: Totals) -> dict[str, float]:
    """A queue runs one copy at a time, on whichever of the shared DMA engines."""
    busy = {engine: ns for engine, ns in total.ns.items() if Engine(engine) not in DMA_QUEUES}
    queues = [ns for engine, ns in total.ns.items() if Engine(engine) in DMA_QUEUES]
    return {**busy, DMA: max(*queues, total.dma_ns)} if queues else busy


def _spills(program: Program) -> tuple[Spill, ...]:
    written, read = [0] * len(program.buffers), [0] * len(program.buffers)
    for instruction, counts in within(program.body):
        for places, found in ((instruction.written(), written), (instruction.read(), read)):
            for place in places:
                if isinstance(place, Far):
                    found[place.buffer] += prod(counts) * moved(place)
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
