"""Interface of a device program: its arguments and results, by name and in order, and the preparation of its weights.

The preparation of a parameter (a rank's slice, casts) is data. The device's loader applies it to the tensors of a
checkpoint as the emulator's loader does. Section 4 of docs/reference/store-format.md has the JSON document.

Values are held as the emulator holds them (floats as float32 arrays, 64-bit integers), and are stored as a device
stores them: in the element type on the device, with integers clipped to 32 bits and truth values as bytes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from nxpipe.emulator.errors import GraphInvalid, InterfaceInvalid, MissingTensor, WrongTensor
from nxpipe.emulator.ir.decoding import read_operator, read_type
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.lower.hbm_buffers import narrowed
from nxpipe.emulator.numerics import Array, round_to, settle
from nxpipe.emulator.ops import Cast, RankSlice, attributes

FORMAT: Final = "nxpipe.interface/1"
RANK: Final = "own_rank"  # the input with the number of the rank, in programs that read it
_ROLES: Final = (Role.INPUT, Role.STATE, Role.PARAMETER)

Preparation = tuple[Cast | RankSlice, ...]


@dataclass(frozen=True)
class Argument:
    """A parameter of the entry function. `whole` is the type of the tensor that the host has, `type` that of the
    argument; `preparation` is the host's work between them. A state has the number of the result that replaces it."""

    name: str
    role: Role
    whole: TensorType
    type: TensorType
    preparation: Preparation = ()
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
        steps = list(self.preparation)
        while steps and isinstance(op := steps[0], RankSlice):  # first, so that a rank converts its own share only
            array = op.piece(array, rank)
            del steps[0]
        dtype = self.whole.dtype
        held = round_to(array, dtype) if dtype.is_float else array
        for op in steps:
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
    """The arguments and results of a program for `degree` ranks."""

    degree: int
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]

    def of_role(self, role: Role) -> list[Argument]:
        return [argument for argument in self.arguments if argument.role is role]

    @property
    def requested(self) -> list[Argument]:
        """The arguments that a request has: inputs, and states before the run."""
        return [each for each in self.arguments if each.role is not Role.PARAMETER and each.name != RANK]

    def to_bytes(self) -> bytes:
        document = {
            "format": FORMAT,
            "degree": self.degree,
            "arguments": [_argument_document(argument) for argument in self.arguments],
            "results": [{"name": result.name, "type": _type_document(result.type)} for result in self.results],
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def interface_from(data: bytes) -> Interface:
    """The interface of a document; InterfaceInvalid for one that this version would not write."""
    try:
        document = json.loads(data)
        if document["format"] != FORMAT:
            raise InterfaceInvalid(f"it is a {document['format']!r:.40}, not a {FORMAT}")
        results = tuple(Result(_name(each), _type_from(each["type"])) for each in document["results"])
        arguments = tuple(_argument_from(each, results) for each in document["arguments"])
        degree = document["degree"]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, GraphInvalid) as fault:
        raise InterfaceInvalid(f"{type(fault).__name__}: {fault}") from fault
    if not isinstance(degree, int) or degree < 1:
        raise InterfaceInvalid(f"its degree is {degree!r:.40}")
    for names in ([each.name for each in arguments], [each.name for each in results]):
        if len(set(names)) != len(names):
            raise InterfaceInvalid("it names a tensor twice")
    return Interface(degree, arguments, results)


def _argument_document(argument: Argument) -> dict[str, Any]:
    return {
        "name": argument.name,
        "role": argument.role.value,
        "whole": _type_document(argument.whole),
        "type": _type_document(argument.type),
        "preparation": [_step_document(op) for op in argument.preparation],
        "alias": argument.alias,
    }


def _argument_from(document: Mapping[str, Any], results: Sequence[Result]) -> Argument:
    """An argument whose preparation leads from its whole type to its own, and whose result has its type."""
    name, whole, type_ = _name(document), _type_from(document["whole"]), _type_from(document["type"])
    steps = tuple(_step_from(each) for each in document["preparation"])
    role, alias = Role(document["role"]), document["alias"]
    prepared = whole
    for op in steps:
        prepared = op.infer(prepared)
    if prepared != type_ or role not in _ROLES:
        raise ValueError(f"{role} {name[:80]} is prepared as {prepared}, and the program takes {type_}")
    if (alias is not None) != (role is Role.STATE):
        raise ValueError(f"{role} {name[:80]} has the alias {alias}")
    if alias is not None and (alias not in range(len(results)) or results[alias].type != type_):
        raise ValueError(f"state {name[:80]} is replaced by result {alias}, which is of another type, or absent")
    return Argument(name, role, whole, type_, steps, alias)


def _name(document: Mapping[str, Any]) -> str:
    name = document["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("a tensor has no name")
    return name


def _type_document(type_: TensorType) -> dict[str, Any]:
    return {"dtype": type_.dtype.value, "shape": list(type_.shape)}


def _type_from(document: Mapping[str, Any]) -> TensorType:
    return read_type(document["dtype"], document["shape"])


def _step_document(op: Cast | RankSlice) -> dict[str, Any]:
    return {op.name: attributes(op)}


def _step_from(document: Mapping[str, Any]) -> Cast | RankSlice:
    (name, plain), *others = document.items()
    op = read_operator(name, plain)
    if others or not isinstance(op, Cast | RankSlice):
        raise ValueError(f"{name[:40]} is no preparation of a weight")
    return op


def stored(held: Array, dtype: DType) -> Array:
    """A value as an array of a device's elements."""
    return np.ascontiguousarray(narrowed(held, dtype)).astype(dtype.on_device.stored).reshape(held.shape)


def held(array: Array, dtype: DType) -> Array:
    """A value from an array of a device's elements."""
    return array.astype(dtype.held) if dtype is not DType.BOOL else array != 0
