"""An executable on emulated cores, instruction by instruction, as a host sees it: whole weights, a caller's types."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nxpipe.emulator.core import Machine, Statistics
from nxpipe.emulator.core.memory import put
from nxpipe.emulator.errors import MissingTensor
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.executable.port import Port
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.legality import check
from nxpipe.emulator.isa.program import RANK, Buffer, Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.ranks import States
from nxpipe.emulator.run.resident import Resident, Shelf, layout


@dataclass(frozen=True, eq=False)
class Isa:
    """`order` is that of `emulator.core.Machine`: which engine goes first. `races`: whether somebody looks for them."""

    executable: Executable
    order: str = "hostile"
    races: bool = True

    @property
    def ports(self) -> tuple[Port, ...]:
        return self.executable.ports

    @property
    def ranks(self) -> int:
        return self.executable.program.ranks

    @property
    def core(self) -> str:
        return self.executable.program.core

    @cached_property
    def weights(self) -> Mapping[str, int]:
        return {str(layout(buffer)): buffer.nbytes for _, buffer in self.buffers(Role.PARAMETER)}

    @cached_property
    def scratch(self) -> int:
        """All of HBM that the program uses, addresses being shared among scratch already."""
        stays = sum(buffer.nbytes for role in (Role.PARAMETER, Role.STATE) for _, buffer in self.buffers(role))
        return max(self.executable.program.hbm - stays, 0)

    @cached_property
    def states(self) -> Mapping[str, TensorType]:
        ports = self.executable.of_role(Role.STATE)
        return {
            name: TensorType(buffer.shape, ports[name].type.dtype)
            for _, buffer in self.buffers(Role.STATE)
            for name in buffer.names
        }

    def buffers(self, role: Role) -> Iterator[tuple[int, Buffer]]:
        return (each for each in enumerate(self.executable.program.buffers) if each[1].role is role)

    def load(self, weights: Mapping[str, Array], shelf: Shelf | None = None) -> "LoadedIsa":
        check(self.executable.program)
        return LoadedIsa(self, weights, {} if shelf is None else shelf)


class LoadedIsa:
    """The machines of all ranks, with each rank's weights in their memory."""

    def __init__(self, code: Isa, weights: Mapping[str, Array], shelf: Shelf) -> None:
        self._code = code
        self._machine = Machine(code.executable.program, order=code.order, check=code.races)
        self.statistics = Statistics()  # of all runs together, on each core
        if any(RANK in buffer.names for _, buffer in code.buffers(Role.INPUT)):
            for rank in range(code.ranks):
                self._machine.write(RANK, np.array([rank]), rank)
        for number, buffer in code.buffers(Role.PARAMETER):
            self._load(number, buffer, weights, shelf)

    def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
        """States that are resident are worked on where they are."""
        machine, executable = self._machine, self._code.executable
        for name, port in executable.of_role(Role.INPUT).items():
            if name not in inputs:
                raise MissingTensor("input", name, str(port.type))
        for name, array in inputs.items():
            machine.write(name, array)
        for rank, own in enumerate(states or ()):
            self._give(rank, own)
        self.statistics += machine.execute()
        outputs = {name: self._read(port, 0) for name, port in executable.of_role(Role.OUTPUT).items()}
        return outputs, [self._after(rank, own) for rank, own in enumerate(states or [{}] * machine.ranks)]

    def _load(self, number: int, buffer: Buffer, weights: Mapping[str, Array], shelf: Shelf) -> None:
        """Where a program of the same model has it already, it stays; nobody writes to weights, so ranks have those
        that are not divided in common too."""
        ranks, piece = self._code.ranks, self._code.executable.divisions.get(number)
        own = [self._machine.storage(number, rank) for rank in range(ranks)]
        what = (layout(buffer), piece)
        if what not in shelf:
            shelf[what] = own if piece else own[:1] * ranks
            for index, name in enumerate(buffer.names):
                if name not in weights:
                    raise MissingTensor("parameter", name, str(TensorType(buffer.shape, buffer.dtype)))
                shares = piece.parted(weights[name], ranks) if piece else [weights[name]]
                for storage, share in zip(shelf[what], shares, strict=False):
                    put(storage, buffer, index, share)
        for storage, shared in zip(own, shelf[what], strict=True):
            storage.alias(shared)

    def _give(self, rank: int, states: Mapping[str, Array]) -> None:
        if isinstance(states, Resident):
            for number, buffer in self._code.buffers(Role.STATE):
                self._machine.storage(number, rank).alias(states.storage(buffer))
            return
        for name, array in states.items():
            self._machine.write(name, array, rank)

    def _after(self, rank: int, states: Mapping[str, Array]) -> Mapping[str, Array]:
        if isinstance(states, Resident):
            return states
        return {name: self._read(port, rank) for name, port in self._code.executable.of_role(Role.STATE).items()}

    def _read(self, port: Port, rank: int) -> Array:
        """In the caller's type; the machine has narrower integers."""
        return self._machine.read(port.name, rank).astype(port.type.dtype.held, copy=False)
