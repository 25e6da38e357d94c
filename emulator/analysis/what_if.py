"""What-if runs of a timeline: the predicted time with one cost changed, and the action that the change stands for.

Each gain is that of one change alone, and an upper bound for its action: a cost is removed, not the work.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Final

from nxpipe.emulator.analysis.execution_trace import DMA, nanoseconds
from nxpipe.emulator.analysis.profile import NO_OPERATOR, PathShare, Place, Profile
from nxpipe.emulator.hardware import CoreSpec
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.isa.cost import Cost, cost, run_bytes, transfer_bytes, transfer_ns
from nxpipe.emulator.isa.instruction import DMA_QUEUES, Engine, Instruction
from nxpipe.emulator.isa.operands import Far
from nxpipe.emulator.isa.program import Program, Role, within
from nxpipe.emulator.isa.tensor import Matmul
from nxpipe.emulator.schedule.timeline import latency_ns

Price = Callable[[Instruction, CoreSpec], Cost]
LEAST_RUN: Final = 512  # bytes of a descriptor from which a transfer is efficient
LEAST_GAIN: Final = 0.01
SHOWN: Final = 3
_FREE: Final = Cost(0.0, 0.0)


@dataclass(frozen=True)
class Change:
    """A change of one cost: its name, the predicted time with it, the gain as a share of the time, and the action."""

    name: str
    latency_ns: float
    gain: float
    action: str

    def document(self) -> dict[str, Any]:
        return {
            "change": self.name,
            "latency_ns": round(self.latency_ns, 3),
            "gain": round(self.gain, 4),
            "action": self.action,
        }


@dataclass(frozen=True)
class _Candidate:
    """A change to try: costs, a time that the result is not below, and the action, in words that need the profile."""

    name: str
    price: Price
    action: str
    least_ns: float = 0.0


def changes(profile: Profile, most: int = SHOWN) -> list[Change]:
    """The changes with the largest gains, at most so many."""
    now = nanoseconds(profile.latency_ps)
    found = []
    for candidate in _candidates(profile):
        then = latency_ns(profile.program, None, candidate.price)
        if then is not None and now:
            then = max(then, candidate.least_ns)
            found.append(Change(candidate.name, then, 1 - then / now, candidate.action))
    helpful = [change for change in found if change.gain >= LEAST_GAIN]
    return sorted(helpful, key=lambda change: (-change.gain, change.name))[:most]


def _candidates(profile: Profile) -> Iterator[_Candidate]:
    """The changes of costs that the program pays."""
    program, busy = profile.program, profile.busy
    if DMA in busy:
        yield from _of_transfers(profile)
    if _bytes_of(program, Role.PARAMETER, DType.FLOAT32) or _has_fp32_matmuls(program):
        yield _Candidate(
            "fp32 weights and matmuls in bf16",
            partial(_narrowed, program),
            "cast them: --autocast all, if their accuracy permits it",
        )
    for engine, remedy in _ENGINE_REMEDIES.items():
        if engine in busy:
            yield _Candidate(
                f"the {_SPELLED[engine]} engine takes no time",
                partial(_without_engine, engine),
                f"{remedy}; most of its time: {_most(profile, partial(_busy_of, engine))}",
            )
    if Engine.TENSOR in busy:
        yield _Candidate(
            "matmuls fill the tensor engine's array",
            _filled,
            "a larger batch or bucket, or a smaller --tp, fills more of its rows and columns",
        )
    if Engine.COLLECTIVE in busy:
        count = _executed(program, lambda instruction: instruction.engine is Engine.COLLECTIVE)
        yield _Candidate(
            "collectives take no time",
            partial(_without_engine, Engine.COLLECTIVE),
            f"a smaller --tp: {count:,} collectives among {program.ranks} ranks",
        )


def _of_transfers(profile: Profile) -> Iterator[_Candidate]:
    program = profile.program
    transfers = _executed(program, _is_transfer)
    mean = sum(each.nbytes for each in profile.transfer_sizes()) // max(transfers, 1)
    yield _Candidate(
        "transfers overlap with all compute",
        _without_transfers,
        "overlap DMA with compute: load the next tiles while these are computed; the transfers together still take "
        f"{profile.utilisation.totals.dma_ns / 1e6:.2f} ms of the DMA engines",
        profile.utilisation.totals.dma_ns,
    )
    yield _Candidate(
        "transfers start at once",
        _without_latency,
        f"fewer and larger transfers: {transfers:,} of {_size(mean)} on average, each with a start-up of 2 us",
    )
    if short := _short_runs(profile):
        (place, most), total = short.most_common(1)[0], short.total()
        yield _Candidate(
            f"descriptors have at least {LEAST_RUN} bytes",
            _with_long_runs,
            f"lay tensors out so that contiguous runs have {LEAST_RUN} bytes: {_size(total)} move in shorter ones, "
            f"most of them for {_spelled(place)} ({most / total:.0%})",
        )
    if spilled := profile.whole.spilled:
        yield _Candidate(
            "copies to and from scratch in HBM take no time",
            partial(_without_role, program, Role.SCRATCH),
            f"keep values in SBUF (a smaller batch or bucket): {_size(spilled)} go through scratch, most of them of "
            f"{_most(profile, lambda share: share.spilled)}",
        )
    if weights := _bytes_of(program, Role.PARAMETER):
        yield _Candidate(
            "weights are loaded in no time",
            partial(_without_role, program, Role.PARAMETER),
            f"a larger batch, whose rows share the {_size(weights)} of weights that are loaded",
        )


_SPELLED: Final = {Engine.VECTOR: "vector", Engine.SCALAR: "scalar", Engine.GPSIMD: "GpSimd"}
_ENGINE_REMEDIES: Final = {
    Engine.VECTOR: "less elementwise work: 16-bit activations (--autocast all), or fewer passes over them",
    Engine.SCALAR: "fewer activation functions",
    Engine.GPSIMD: "operators that other engines execute",
}


# Costs


def _is_transfer(instruction: Instruction) -> bool:
    return instruction.engine in DMA_QUEUES


def _without_transfers(instruction: Instruction, core: CoreSpec) -> Cost:
    return _FREE if _is_transfer(instruction) else cost(instruction, core)


def _without_latency(instruction: Instruction, core: CoreSpec) -> Cost:
    priced = cost(instruction, core)
    return replace(priced, start_ns=0.0) if _is_transfer(instruction) else priced


def _with_long_runs(instruction: Instruction, core: CoreSpec) -> Cost:
    priced = cost(instruction, core)
    return replace(priced, ns=transfer_ns(instruction, core, LEAST_RUN)) if _is_transfer(instruction) else priced


def _without_role(program: Program, role: Role, instruction: Instruction, core: CoreSpec) -> Cost:
    is_free = _is_transfer(instruction) and role in _roles(program, instruction)
    return _FREE if is_free else cost(instruction, core)


def _without_engine(engine: Engine, instruction: Instruction, core: CoreSpec) -> Cost:
    return _FREE if instruction.engine is engine else cost(instruction, core)


def _narrowed(program: Program, instruction: Instruction, core: CoreSpec) -> Cost:
    priced = cost(instruction, core)
    if _is_transfer(instruction) and any(
        place.dtype is DType.FLOAT32 and program.buffers[place.buffer].role is Role.PARAMETER
        for place in instruction.places.values()
        if isinstance(place, Far)
    ):
        return replace(priced, ns=priced.ns / 2)
    return replace(priced, ns=priced.ns / core.fp32_cycle_factor) if _is_fp32_matmul(instruction) else priced


def _filled(instruction: Instruction, core: CoreSpec) -> Cost:
    priced = cost(instruction, core)
    if not isinstance(instruction, Matmul):
        return priced
    slow = core.fp32_cycle_factor if _is_fp32_matmul(instruction) else 1
    stationary, moving = instruction.stationary, instruction.moving
    products = stationary.partitions * stationary.elements * moving.elements
    return replace(priced, ns=slow * products / (core.pe_rows * core.pe_cols) / core.tensor_ghz)


# Figures for the actions


def _is_fp32_matmul(instruction: Instruction) -> bool:
    return isinstance(instruction, Matmul) and DType.FLOAT32 in (instruction.stationary.dtype, instruction.moving.dtype)


def _has_fp32_matmuls(program: Program) -> bool:
    return any(_is_fp32_matmul(instruction) for instruction, _ in within(program.body))


def _roles(program: Program, instruction: Instruction) -> set[Role]:
    places = instruction.places.values()
    return {program.buffers[place.buffer].role for place in places if isinstance(place, Far)}


def _executed(program: Program, condition: Callable[[Instruction], bool]) -> int:
    return sum(prod(counts) for instruction, counts in within(program.body) if condition(instruction))


def _sum_bytes(program: Program, condition: Callable[[Instruction], bool]) -> int:
    return sum(
        prod(counts) * transfer_bytes(instruction)
        for instruction, counts in within(program.body)
        if condition(instruction)
    )


def _short_runs(profile: Profile) -> Counter[Place]:
    """Bytes that move in short descriptors, by place."""
    short = Counter[Place]()
    for (instruction, counts), place in zip(within(profile.program.body), profile.places, strict=True):
        if _is_transfer(instruction) and run_bytes(instruction) < LEAST_RUN:
            short[place] += prod(counts) * transfer_bytes(instruction)
    return short


def _bytes_of(program: Program, role: Role, dtype: DType | None = None) -> int:
    def has(instruction: Instruction) -> bool:
        buffers = (program.buffers[far.buffer] for far in instruction.places.values() if isinstance(far, Far))
        return _is_transfer(instruction) and any(b.role is role and dtype in (None, b.dtype) for b in buffers)

    return _sum_bytes(program, has)


def _most(profile: Profile, figure: Callable[[PathShare], int]) -> str:
    """The place with most of a figure, and its part of the sum."""
    place, share = max(profile.shares.items(), key=lambda item: (figure(item[1]), item[0]))
    total = sum(map(figure, profile.shares.values()))
    return f"{_spelled(place)} ({figure(share) / total:.0%})" if total else "none"


def _busy_of(engine: Engine, share: PathShare) -> int:
    return share.busy[engine]


def _spelled(place: Place) -> str:
    return place.module if place.operator == NO_OPERATOR else f"{place.operator} of {place.module}"


def _size(nbytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
