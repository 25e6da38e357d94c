"""What can be loaded, whichever way it is run: `Fast` runs a compiled graph here, `Isa` instructions, in `isa.py`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from nxpipe.emulator.analysis.graph_memory import peak_bytes, states
from nxpipe.emulator.compile import CompiledGraph
from nxpipe.emulator.executable.port import Port
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes.shard import Piece
from nxpipe.emulator.run.ranks import Loaded, LoadedRanks
from nxpipe.emulator.run.resident import Shelf


class Code(Protocol):
    """A program as it can be loaded."""

    @property
    def ports(self) -> tuple[Port, ...]: ...

    @property
    def ranks(self) -> int: ...

    @property
    def core(self) -> str | None:
        """The generation that it is for, if it is for one."""

    @property
    def weights(self) -> Mapping[str, int]:
        """The bytes of each on one rank; what two programs call the same they have in common."""

    @property
    def scratch(self) -> int:
        """Bytes on one rank that it needs while it runs, beside weights and states."""

    @property
    def states(self) -> Mapping[str, TensorType]:
        """One rank's share of each."""

    def load(self, weights: Mapping[str, Array], shelf: Shelf | None = None) -> Loaded:
        """`shelf`: what programs of the same model have loaded already, on the same cores."""


@dataclass(frozen=True, eq=False)
class Fast:
    """A compiled graph, run by the operators' numerics; it runs on any generation."""

    program: CompiledGraph
    ports: tuple[Port, ...]

    @property
    def ranks(self) -> int:
        return self.program.degree

    @property
    def core(self) -> None:
        return None

    @cached_property
    def weights(self) -> Mapping[str, int]:
        whole = self.program.whole.parameters
        return {name: _share(value.type, self.program.parameters.get(name)).nbytes for name, value in whole.items()}

    @cached_property
    def scratch(self) -> int:
        ends = sum(port.type.nbytes for port in self.ports if port.role is not Role.STATE)
        constants = sum(value.type.nbytes for value in self.program.graph.constants)
        return ends + constants + peak_bytes(self.program.graph)

    @cached_property
    def states(self) -> Mapping[str, TensorType]:
        return {name: value.type for name, value in states(self.program.graph).items()}

    def load(self, weights: Mapping[str, Array], shelf: Shelf | None = None) -> Loaded:
        return LoadedRanks(self.program.graph, weights)


def _share(whole: TensorType, piece: Piece | None) -> TensorType:
    return piece.local(whole) if piece else whole
