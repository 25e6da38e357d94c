"""Who carries a compiled program out: `fast`, each operator by its numerics; or `isa`, emulated cores, instruction by
instruction of the program that is stored, or else written for them now."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.verify import Arrays

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.compile import Program
    from nxpipe.emulator.core import Statistics
    from nxpipe.emulator.executable.executable import Executable
    from nxpipe.emulator.run.isa import LoadedIsa
    from nxpipe.emulator.run.ranks import Runnable

Mode: TypeAlias = Literal["fast", "isa"]
_HOSTILE: Final = "hostile"


@dataclass(frozen=True)
class Execution:
    """`order` says which engine goes when several may, which only `isa` has."""

    mode: Mode = "fast"
    order: str = _HOSTILE

    @classmethod
    def of(cls, mode: Mode, order: str | None) -> "Execution":
        """What the options say."""
        if order is not None and mode != "isa":
            raise InputInvalid("--engine-order applies to emulated cores; add --mode isa")
        return cls(mode, order or _HOSTILE)


FAST: Final = Execution()


@dataclass(frozen=True)
class Runner:
    """`core` is the generation of cores, which only `isa` has."""

    execution: Execution
    core: str

    def load(self, program: "Program", weights: Arrays, stored: "Executable | None" = None) -> "Running":
        """`stored`: the program of instructions that an artifact has; it is never made anew."""
        if self.execution.mode == "fast":
            from nxpipe.emulator.run.ranks import LoadedRanks

            return Running(program, LoadedRanks(program.graph, weights))
        from nxpipe.emulator.emit import emit
        from nxpipe.emulator.run.isa import Isa

        cores = Isa(stored or emit(program, self.core), order=self.execution.order).load(weights)
        return Running(program, cores, counting=cores)


class Running:
    """A program with its weights: whole tensors go in, and whole ones come out."""

    def __init__(self, program: "Program", ranks: "Runnable", counting: "LoadedIsa | None" = None) -> None:
        from nxpipe.emulator.run.ranks import LoadedProgram

        self._whole = LoadedProgram(program, ranks)
        self._counting = counting

    def run(self, inputs: Arrays) -> "dict[str, np.ndarray[Any, Any]]":
        return self._whole.run(inputs)

    @property
    def work(self) -> "Statistics | None":
        """What all runs so far amounted to on each core; None where no instructions were counted."""
        return self._counting.statistics if self._counting else None


def sentence(work: "Statistics") -> str:
    """What a run amounted to, in one line."""
    moved = ", ".join(
        f"{memory.upper()} {human_bytes(work.read.get(memory, 0))} read and {human_bytes(work.written[memory])} written"
        for memory in sorted(work.written)
    )
    return f"{sum(work.engines.values()):,} instructions on each core; {moved}"
