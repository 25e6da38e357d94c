"""The interface of a module: what each argument and result of its entry function is, by name and in order.

Values are held as the emulator holds them (floats as float32 arrays, 64-bit integers), and are stored as a device
stores them: in the element type on the device, with integers clipped to 32 bits and truth values as bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nxpipe.emulator.errors import MissingTensor, WrongTensor
from nxpipe.emulator.hlo.collective import RANK
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower.hbm_buffers import narrowed
from nxpipe.emulator.numerics import Array, round_to, settle
from nxpipe.emulator.ops import Cast, RankSlice


@dataclass(frozen=True)
class Argument:
    """A parameter of the entry function. `whole` is the type of the tensor that the host has, `type` that of the
    argument; `preparation` is the host's work between them. A state has the number of the result that replaces it."""

    name: str
    role: Role
    whole: TensorType
    type: TensorType
    preparation: tuple[Cast | RankSlice, ...] = ()
    alias: int | None = None

    def on_rank(self, arrays: Mapping[str, Array], rank: int) -> Array:
        """The argument as it is stored on a rank, from the host's tensors by name."""
        if self.name == RANK:
            return stored(np.asarray([rank]), self.type.dtype)
        if self.name not in arrays:
            raise MissingTensor(self.role, self.name, str(self.whole))
        array = np.asarray(arrays[self.name])
        if array.shape != self.whole.shape:
            raise WrongTensor(self.role, self.name, str(self.whole), f"{array.dtype}{list(array.shape)}")
        held = round_to(array, self.whole.dtype) if self.whole.dtype.is_float else array
        dtype = self.whole.dtype
        for op in self.preparation:
            if isinstance(op, RankSlice):
                held = op.piece(held, rank)
            else:
                dtype = op.dtype
                held = settle(op.compute(held), dtype)
        return stored(held, dtype)


@dataclass(frozen=True)
class Result:
    """A result of the entry function."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Interface:
    """The arguments and results of a module for `degree` ranks."""

    degree: int
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]


def stored(held: Array, dtype: DType) -> Array:
    """A value as an array of a device's elements."""
    return np.ascontiguousarray(narrowed(held, dtype)).astype(dtype.on_device.stored).reshape(held.shape)


def held(array: Array, dtype: DType) -> Array:
    """A value from an array of a device's elements."""
    return array.astype(dtype.held) if dtype is not DType.BOOL else array != 0
