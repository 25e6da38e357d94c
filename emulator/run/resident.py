"""Tensors that stay on a core between requests: weights that several programs read, and states."""

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from nxpipe.emulator.core.memory import Storage, get, in_hbm, put
from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.isa.program import Buffer
from nxpipe.emulator.numerics import Array

# What programs of one model have in common, by what it is and how it lies: where it is on each rank.
Shelf: TypeAlias = MutableMapping[object, Sequence[Storage]]


def layout(buffer: Buffer) -> Buffer:
    """What two programs must agree on to have a buffer in common; each has it at an address of its own."""
    return replace(buffer, address=0)


class Resident(Mapping[str, Array]):
    """One core's states, zero at first. A program of instructions works on them where they lie (`storage`); for one
    that wants them in another layout they are moved there. Whoever else reads them is given copies."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self._types = types
        self._arrays: dict[str, Array] = {}
        self._storages: dict[Buffer, Storage] = {}

    def only(self, names: Collection[str]) -> "Resident":
        """The same states, of which a program sees these."""
        fewer = copy(self)
        fewer._types = {name: self._types[name] for name in names}
        return fewer

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def __getitem__(self, name: str) -> Array:
        found = self._known(name)
        return np.zeros(self._types[name].shape, self._types[name].dtype.held) if found is None else found

    def take(self, after: Mapping[str, Array]) -> None:
        """What a program made of them, unless that worked on them in place."""
        if not isinstance(after, Resident):
            self._leave(after.keys())
            self._arrays |= after

    def storage(self, buffer: Buffer) -> Storage:
        """Where they are, laid out as a program has them."""
        wanted = layout(buffer)
        if wanted not in self._storages:
            made = in_hbm(buffer.nbytes, np.ones(len(buffer.names), np.bool_))
            for index, name in enumerate(buffer.names):
                known = self._known(name)
                if known is not None:
                    put(made, buffer, index, known)
            self._leave(buffer.names)
            self._storages[wanted] = made
        return self._storages[wanted]

    def _known(self, name: str) -> Array | None:
        for buffer, storage in self._storages.items():
            if name in buffer.names:
                return get(storage, buffer, buffer.names.index(name))
        return self._arrays.get(name)

    def _leave(self, names: Collection[str]) -> None:
        """These will be elsewhere; of what lay beside them, an array is kept."""
        for buffer in [buffer for buffer in self._storages if not set(names).isdisjoint(buffer.names)]:
            storage = self._storages.pop(buffer)
            self._arrays |= {name: get(storage, buffer, index) for index, name in enumerate(buffer.names)}
        for name in names:
            self._arrays.pop(name, None)
