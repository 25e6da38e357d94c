"""What a program adds up to: each instruction times the turns of the loops around it, without running any."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Final

from nxpipe.emulator.hardware import CORES, CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.cycles import cost
from nxpipe.emulator.isa.instructions import DMA_QUEUES, Instruction, Matmul
from nxpipe.emulator.isa.operands import Place, Tile
from nxpipe.emulator.isa.program import Loop, Program, Step
from nxpipe.emulator.isa.transfer import moved, share_of_dma

HBM: Final = "hbm"


@dataclass
class Totals:
    """By engine and kind of instruction, and by memory. `ns` is the time in which an engine has none for another
    instruction; queues of DMA share their engines, which `dma_ns` is the time of if none ever idles. `ideal_cycles` are
    those that the program's multiplications would take on a tensor engine of which no row, column or cycle is idle."""

    written_down: Counter[tuple[str, str]] = field(default_factory=Counter)
    carried_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    ns: dict[str, float] = field(default_factory=dict)
    dma_ns: float = 0.0
    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    multiply_adds: int = 0
    tensor_cycles: float = 0.0
    ideal_cycles: float = 0.0

    @property
    def static(self) -> int:
        return self.written_down.total()

    @property
    def engines(self) -> Counter[str]:
        return _summed({engine: count} for (engine, _), count in self.carried_out.items())

    @property
    def kinds(self) -> Counter[str]:
        return _summed({kind: count} for (_, kind), count in self.carried_out.items())

    @property
    def utilisation(self) -> float | None:
        """Of the tensor engine while it is busy; None where it has nothing to do."""
        return self.ideal_cycles / self.tensor_cycles if self.tensor_cycles else None

    def document(self) -> dict[str, object]:
        """For a report: everything, in an order that does not change."""
        return {
            "static_instructions": self.static,
            "instructions": self.carried_out.total(),
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
    core, found = CORES[program.core], Totals()
    for instruction, counts in within(program.body):
        _add(found, instruction, counts, core)
    return found


def within(body: tuple[Step, ...], counts: tuple[int, ...] = ()) -> Iterator[tuple[Instruction, tuple[int, ...]]]:
    """Each instruction once, in the order of the text, with how often each loop around it runs."""
    for step in body:
        if isinstance(step, Loop):
            yield from within(step.body, (*counts, step.count))
        else:
            yield step, counts


def _add(found: Totals, instruction: Instruction, counts: tuple[int, ...], core: CoreSpec) -> None:
    times = prod(counts)
    price = cost(instruction, core)
    engine = instruction.engine.value
    found.written_down[engine, instruction.name] += 1
    found.carried_out[engine, instruction.name] += times
    found.ns[engine] = found.ns.get(engine, 0.0) + times * price.ns
    if instruction.engine in DMA_QUEUES:
        found.dma_ns += times * price.ns * share_of_dma(instruction, core)
    for place in instruction.written():
        found.written[_level(place)] += times * moved(place)
    for place in instruction.read():
        found.read[_level(place)] += times * moved(place)
    if isinstance(instruction, Matmul):
        _add_products(found, instruction, times, core)
        # Those that do not add have been counted as if they read their sums.
        if instruction.reads_of_dst():
            found.read[_level(instruction.dst)] -= _first(instruction.accumulate, counts) * moved(instruction.dst)
    if price.cycles is not None and engine == "tensor":
        found.tensor_cycles += times * price.cycles


def _add_products(found: Totals, it: Matmul, times: int, core: CoreSpec) -> None:
    products = it.stationary.partitions * it.stationary.elements * it.moving.elements
    slow = core.fp32_cycle_factor if DType.FLOAT32 in (it.stationary.dtype, it.moving.dtype) else 1
    found.multiply_adds += times * products
    found.ideal_cycles += times * slow * products / (core.pe_rows * core.pe_cols)


def _first(accumulate: Affine, counts: tuple[int, ...]) -> int:
    """How often it is 0, and a matmul adds to nothing: in the first turn of all loops that it changes with. A number
    that counts otherwise than up from 0 counts as if it were above."""
    if accumulate.bounds(counts)[0] != 0 or accumulate.turns or accumulate.base:
        return prod(counts) if accumulate.bounds(counts)[1] <= 0 else 0
    taken = prod(counts[depth] for depth, _ in accumulate.terms)
    return prod(counts) // taken if taken else 0


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    found = Counter[str]()
    for each in counts:
        found.update(each)
    return found


def _level(place: Place) -> str:
    return place.memory.value if isinstance(place, Tile) else HBM
