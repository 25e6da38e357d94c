"""Execution of an executable on emulated cores, instruction by instruction, with whole weights and the caller's types.

States (`Resident`) and weights that several programs of a model read (`SharedWeights`) stay on a core between requests.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from nxpipe.emulator.core.machine import Machine, Statistics
from nxpipe.emulator.core.memory import Storage, get, in_hbm, put
from nxpipe.emulator.errors import MissingTensor
from nxpipe.emulator.executable.executable import Executable
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.legality import check
from nxpipe.emulator.isa.program import RANK, Buffer, Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.fast import States

# Weights that the programs of one model share: the storage on each rank, by (layout, sharding).
SharedWeights: TypeAlias = MutableMapping[object, Sequence[Storage]]


def layout(buffer: Buffer) -> Buffer:
    """The key by which programs share a buffer: all its properties except the address."""
    return replace(buffer, address=0)


class Resident(Mapping[str, Array]):
    """The states of one core, initially zero. A program updates them in place (`storage`); a program with another
    layout of the states receives a converted copy. The mapping interface returns copies."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self._types = types
        self._arrays: dict[str, Array] = {}
        self._storages: dict[Buffer, Storage] = {}

    def only(self, names: Collection[str]) -> "Resident":
        """A view of the named states, for a program that declares only these."""
        view = copy(self)
        view._types = {name: self._types[name] for name in names}
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def __getitem__(self, name: str) -> Array:
        array = self._current(name)
        return np.zeros(self._types[name].shape, self._types[name].dtype.held) if array is None else array

    def take(self, after: Mapping[str, Array]) -> None:
        """Store the states after a run, unless the program updated them in place."""
        if not isinstance(after, Resident):
            self._drop(after.keys())
            self._arrays |= after

    def storage(self, buffer: Buffer) -> Storage:
        """The storage of states in the layout of a program's buffer."""
        key = layout(buffer)
        if key not in self._storages:
            storage = in_hbm(buffer.nbytes, np.ones(len(buffer.names), np.bool_))
            for index, name in enumerate(buffer.names):
                array = self._current(name)
                if array is not None:
                    put(storage, buffer, index, array)
            self._drop(buffer.names)
            self._storages[key] = storage
        return self._storages[key]

    def _current(self, name: str) -> Array | None:
        for buffer, storage in self._storages.items():
            if name in buffer.names:
                return get(storage, buffer, buffer.names.index(name))
        return self._arrays.get(name)

    def _drop(self, names: Collection[str]) -> None:
        """Remove these states. Other states in the same buffers are converted to arrays."""
        for buffer in [buffer for buffer in self._storages if not set(names).isdisjoint(buffer.names)]:
            storage = self._storages.pop(buffer)
            self._arrays |= {name: get(storage, buffer, index) for index, name in enumerate(buffer.names)}
        for name in names:
            self._arrays.pop(name, None)


@dataclass(frozen=True, eq=False)
class Isa:
    """An executable to run. `order` selects the order of engines (`Machine`); `races` turns on race detection."""

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
        """Bytes of HBM other than weights and states."""
        resident = sum(buffer.nbytes for role in (Role.PARAMETER, Role.STATE) for _, buffer in self.buffers(role))
        return max(self.executable.program.hbm - resident, 0)

    @cached_property
    def states(self) -> Mapping[str, TensorType]:
        ports = self.executable.of_role(Role.STATE)
        return {
            name: TensorType(buffer.shape, ports[name].type.dtype)
            for _, buffer in self.buffers(Role.STATE)
            for name in buffer.names
        }

    def buffers(self, role: Role) -> Iterator[tuple[int, Buffer]]:
        buffers = enumerate(self.executable.program.buffers)
        return ((number, buffer) for number, buffer in buffers if buffer.role is role)

    def load(self, weights: Mapping[str, Array], shared_weights: SharedWeights | None = None) -> "LoadedIsa":
        check(self.executable.program)
        return LoadedIsa(self, weights, {} if shared_weights is None else shared_weights)


class LoadedIsa:
    """An executable loaded on all of its ranks, with each rank's weights."""

    def __init__(self, code: Isa, weights: Mapping[str, Array], shared_weights: SharedWeights) -> None:
        self._code = code
        self._machine = Machine(code.executable.program, order=code.order, check=code.races)
        self.statistics = Statistics()  # counts of one core, over all runs
        if any(RANK in buffer.names for _, buffer in code.buffers(Role.INPUT)):
            for rank in range(code.ranks):
                self._machine.write(RANK, np.array([rank]), rank)
        for number, buffer in code.buffers(Role.PARAMETER):
            self._load(number, buffer, weights, shared_weights)

    def run(self, inputs: Mapping[str, Array], states: States | None = None) -> tuple[dict[str, Array], States]:
        """Run the program once. Resident states are updated in place."""
        machine, executable = self._machine, self._code.executable
        for name, port in executable.of_role(Role.INPUT).items():
            if name not in inputs:
                raise MissingTensor("input", name, str(port.type))
        for name, array in inputs.items():
            machine.write(name, array)
        for rank, own in enumerate(states or ()):
            self._set_states(rank, own)
        self.statistics += machine.execute()
        outputs = {name: self._read(port, 0) for name, port in executable.of_role(Role.OUTPUT).items()}
        return outputs, [self._states_after(rank, own) for rank, own in enumerate(states or [{}] * machine.ranks)]

    def _load(self, number: int, buffer: Buffer, weights: Mapping[str, Array], shared_weights: SharedWeights) -> None:
        """Load a weight, or share the storage of another program of the model. Weights are read-only, so ranks share
        weights that are not divided."""
        ranks, sharding = self._code.ranks, self._code.executable.divisions.get(number)
        storages = [self._machine.storage(number, rank) for rank in range(ranks)]
        key = (layout(buffer), sharding)
        if key not in shared_weights:
            shared_weights[key] = storages if sharding else storages[:1] * ranks
            for index, name in enumerate(buffer.names):
                if name not in weights:
                    raise MissingTensor("parameter", name, str(TensorType(buffer.shape, buffer.dtype)))
                shares = sharding.split(weights[name], ranks) if sharding else [weights[name]]
                for storage, share in zip(shared_weights[key], shares, strict=False):
                    put(storage, buffer, index, share)
        for storage, existing in zip(storages, shared_weights[key], strict=True):
            storage.alias(existing)

    def _set_states(self, rank: int, states: Mapping[str, Array]) -> None:
        if isinstance(states, Resident):
            for number, buffer in self._code.buffers(Role.STATE):
                self._machine.storage(number, rank).alias(states.storage(buffer))
            return
        for name, array in states.items():
            self._machine.write(name, array, rank)

    def _states_after(self, rank: int, states: Mapping[str, Array]) -> Mapping[str, Array]:
        if isinstance(states, Resident):
            return states
        return {name: self._read(port, rank) for name, port in self._code.executable.of_role(Role.STATE).items()}

    def _read(self, port: Port, rank: int) -> Array:
        """A tensor in the caller's type; integers on the core may be narrower."""
        return self._machine.read(port.name, rank).astype(port.type.dtype.held, copy=False)
