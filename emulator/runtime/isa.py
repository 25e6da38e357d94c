"""An executable on emulated cores, instruction by instruction, as a host sees it: whole weights, a caller's types."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from emulator.core import Machine, Statistics
from emulator.errors import MissingTensor
from emulator.executable import Executable, Port
from emulator.isa.limits import check
from emulator.isa.program import RANK, Buffer, Role
from emulator.numerics import Array
from emulator.ranks import States
from emulator.types import TensorType


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
        return {name: _each(buffer) for _, buffer, name in self.tensors(Role.PARAMETER)}

    @cached_property
    def scratch(self) -> int:
        """All of HBM that the program uses, addresses being shared among scratch already."""
        stays = sum(_each(buffer) for role in (Role.PARAMETER, Role.STATE) for _, buffer, _ in self.tensors(role))
        return max(self.executable.program.hbm - stays, 0)

    @cached_property
    def states(self) -> Mapping[str, TensorType]:
        ports = self.executable.of_role(Role.STATE)
        return {name: TensorType(it.shape, ports[name].type.dtype) for _, it, name in self.tensors(Role.STATE)}

    def tensors(self, role: Role) -> Iterator[tuple[int, Buffer, str]]:
        """Buffer number, buffer and name of each."""
        for number, buffer in enumerate(self.executable.program.buffers):
            if buffer.role is role:
                yield from ((number, buffer, name) for name in buffer.names)

    def load(self, weights: Mapping[str, Array]) -> "LoadedIsa":
        check(self.executable.program)
        return LoadedIsa(self, weights)


class LoadedIsa:
    """The machines of all ranks, with each rank's weights in their memory."""

    def __init__(self, code: Isa, weights: Mapping[str, Array]) -> None:
        self._code = code
        self._machine = Machine(code.executable.program, order=code.order, check=code.races)
        self.statistics = Statistics()  # of all runs together, on each core
        if any(name == RANK for _, _, name in code.tensors(Role.INPUT)):
            for rank in range(code.ranks):
                self._machine.write(RANK, np.array([rank]), rank)
        for number, buffer, name in code.tensors(Role.PARAMETER):
            if name not in weights:
                raise MissingTensor("parameter", name, str(TensorType(buffer.shape, buffer.dtype)))
            for rank, share in enumerate(self._shares(number, weights[name])):
                self._machine.write(name, share, rank)

    def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
        machine, executable = self._machine, self._code.executable
        for name, port in executable.of_role(Role.INPUT).items():
            if name not in inputs:
                raise MissingTensor("input", name, str(port.type))
        for name, array in inputs.items():
            machine.write(name, array)
        for rank, own in enumerate(states or ()):
            for name, array in own.items():
                machine.write(name, array, rank)
        self.statistics += machine.execute()
        outputs = {name: self._read(port, 0) for name, port in executable.of_role(Role.OUTPUT).items()}
        held = executable.of_role(Role.STATE)
        after = [{name: self._read(port, rank) for name, port in held.items()} for rank in range(machine.ranks)]
        return outputs, after

    def _shares(self, number: int, whole: Array) -> list[Array]:
        piece = self._code.executable.divisions.get(number)
        return piece.parted(whole, self._code.ranks) if piece else [whole] * self._code.ranks

    def _read(self, port: Port, rank: int) -> Array:
        """In the caller's type; the machine has narrower integers."""
        return self._machine.read(port.name, rank).astype(port.type.dtype.held, copy=False)


def _each(buffer: Buffer) -> int:
    return buffer.nbytes // len(buffer.names)
