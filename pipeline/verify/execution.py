"""Execution of a compiled program: `fast` evaluates each operator by its numerics; `isa` runs the instructions, stored
or emitted now, on emulated cores."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from nxpipe.pipeline.models.weights import Arrays
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.emulator.compile import CompiledGraph
    from nxpipe.emulator.core.machine import Statistics
    from nxpipe.emulator.executable.executable import Executable
    from nxpipe.emulator.run.counters import ProgramCounters
    from nxpipe.emulator.run.fast import Runnable
    from nxpipe.emulator.run.isa import LoadedIsa


Mode: TypeAlias = Literal["fast", "isa"]
HOSTILE: Final = "hostile"  # every engine runs as late as its waits permit


@dataclass(frozen=True)
class ExecutionOptions:
    """`order` is the order of engines that may run at the same time; only `isa` has one."""

    mode: Mode = "fast"
    order: str = HOSTILE


FAST: Final = ExecutionOptions()


@dataclass(frozen=True)
class Runner:
    """Loader of programs. `core` is the core generation, for `isa`."""

    execution: ExecutionOptions
    core: str

    def load(self, program: "CompiledGraph", weights: Arrays, stored: "Executable | None" = None) -> "RunnableProgram":
        """Load a program with its weights. `stored` are the instructions of an artifact, which are not emitted
        again."""
        if self.execution.mode == "fast":
            from nxpipe.emulator.run.fast import LoadedRanks

            return RunnableProgram(program, LoadedRanks(program.graph, weights))
        from nxpipe.emulator.compile import emit
        from nxpipe.emulator.run.isa import Isa

        loaded = Isa(stored or emit(program, self.core), order=self.execution.order).load(weights)
        return RunnableProgram(program, loaded, counting=loaded)


class RunnableProgram:
    """A program with its weights. Inputs and outputs are whole tensors, split and joined for its ranks."""

    def __init__(self, program: "CompiledGraph", ranks: "Runnable", counting: "LoadedIsa | None" = None) -> None:
        from nxpipe.emulator.run.fast import LoadedProgram

        self._whole = LoadedProgram(program, ranks)
        self._program, self._counting = program, counting

    def run(self, inputs: Arrays) -> "dict[str, np.ndarray[Any, Any]]":
        return self._whole.run(inputs)

    @contextmanager
    def counted(self, name: str) -> "Iterator[ProgramCounters]":
        """Counters of the program, which the device tools show while it runs.

        They predict nothing: a run is over before a period is.
        """
        from nxpipe.emulator.compile import ports_of
        from nxpipe.emulator.run.counters import SessionCounters
        from nxpipe.emulator.run.model import Fast

        program = self._program
        session = SessionCounters({name: Fast(program, ports_of(program))}, range(program.degree))
        try:
            yield session.programs[name]
        finally:
            session.close()

    @property
    def work(self) -> "Statistics | None":
        """The work of all runs on each core; None if no instructions were counted."""
        return self._counting.statistics if self._counting else None


def statistics_sentence(work: "Statistics") -> str:
    """The work of a run in one line."""
    moved = ", ".join(
        f"{memory.upper()} {human_bytes(work.read.get(memory, 0))} read and {human_bytes(work.written[memory])} written"
        for memory in sorted(work.written)
    )
    return f"{sum(work.engines.values()):,} instructions on each core; {moved}"
