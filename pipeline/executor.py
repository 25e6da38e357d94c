"""Who carries a compiled program out: `fast`, each operator by its numerics; or `isa`, emulated cores, instruction by
instruction of the program that the back end writes for them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import click

from pipeline.output import human_bytes
from pipeline.verify import Arrays

if TYPE_CHECKING:
    import numpy as np

    from emulator.compile import Program
    from emulator.core import Statistics
    from emulator.ranks import Loaded
    from emulator.runtime.isa import LoadedIsa

Mode: TypeAlias = Literal["fast", "isa"]

mode_option = click.option(
    "--mode",
    type=click.Choice(get_args(Mode)),
    default="fast",
    show_default=True,
    help="Run each operator by its numerics, or the program itself on emulated cores, instruction by instruction.",
)


@dataclass(frozen=True)
class Executor:
    """`core` is the generation of cores, which only `isa` has."""

    mode: Mode
    core: str

    def load(self, program: "Program", weights: Arrays) -> "Running":
        if self.mode == "fast":
            from emulator.ranks import LoadedRanks

            return Running(program, LoadedRanks(program.graph, weights))
        from emulator.emit import emit
        from emulator.runtime import Isa

        cores = Isa(emit(program, self.core)).load(weights)
        return Running(program, cores, counting=cores)


class Running:
    """A program with its weights: whole tensors go in, and whole ones come out."""

    def __init__(self, program: "Program", ranks: "Loaded", counting: "LoadedIsa | None" = None) -> None:
        from emulator.ranks import LoadedProgram

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
