"""Which program answers a request: the smallest that it fits into, padded behind, its answer cut back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from nxpipe.emulator.executable.port import Port
from nxpipe.emulator.isa.program import Role
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.code import Code
from nxpipe.emulator.run.status import BadInput, RequestTooLong

Sizes = Mapping[str, int]
_Code = TypeVar("_Code", bound=Code)


@dataclass(frozen=True)
class Fit:
    """A request as one of the programs takes it; `sizes` are its own, by the names of axes."""

    code: Code
    sizes: Sizes

    def padded(self, request: Mapping[str, Array]) -> dict[str, Array]:
        return {port.name: _padded(request[port.name], port) for port in inputs(self.code)}

    def cut(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        ports = {port.name: port for port in self.code.ports if port.role is Role.OUTPUT}
        return {name: self._cut(array, ports[name]) for name, array in outputs.items()}

    def _cut(self, array: Array, port: Port) -> Array:
        lengths = [self.sizes.get(name) for name in port.sizes]
        return array[tuple(slice(length) for length in lengths)]


def inputs(code: Code) -> list[Port]:
    return [port for port in code.ports if port.role is Role.INPUT]


def fit(codes: Sequence[Code], request: Mapping[str, Array], *, with_states: bool) -> Fit:
    """The program with the smallest inputs among those that the request fits into."""
    able = [code for code in codes if _takes(code, request, with_states=with_states)]
    if not able:
        raise BadInput(_nobody(codes, request, with_states=with_states))
    found = [(code, _sizes(inputs(code), request)) for code in able]
    fitting = [Fit(code, sizes) for code, sizes in found if _exceeded(code, sizes) is None]
    if not fitting:
        raise RequestTooLong(_too_long(found))
    return min(fitting, key=lambda one: sum(port.type.nbytes for port in inputs(one.code)))


def _takes(code: Code, request: Mapping[str, Array], *, with_states: bool) -> bool:
    has_states = any(port.role is Role.STATE for port in code.ports)
    return request.keys() == {port.name for port in inputs(code)} and has_states == with_states


def _sizes(ports: Sequence[Port], request: Mapping[str, Array]) -> dict[str, int]:
    """What the request has on axes with a name; all others must be as the program has them."""
    sizes: dict[str, int] = {}
    for port in ports:
        shape = np.shape(request[port.name])
        names = port.sizes or ("",) * port.type.rank
        if len(shape) != port.type.rank:
            raise BadInput(f"input {port.name!r} has {len(shape)} axes, and the program takes {port.type}")
        for axis, (name, length, full) in enumerate(zip(names, shape, port.type.shape, strict=True)):
            if not name and length != full:
                raise BadInput(f"input {port.name!r} is {length} long on axis {axis}, where the program has {full}")
            if name and (not length or sizes.setdefault(name, length) != length):
                raise BadInput(
                    f"input {port.name!r} is {length} long on axis {axis}, its {name}; it must be at least 1, and "
                    f"equal for all inputs (another has {sizes.get(name, length)})"
                )
    return sizes


def _exceeded(code: Code, sizes: Sizes) -> tuple[str, int] | None:
    """The first axis that the program has too little of, and how much it has."""
    for port in inputs(code):
        for name, full in zip(port.sizes, port.type.shape, strict=False):
            if name and sizes[name] > full:
                return name, full
    return None


def _padded(array: Array, port: Port) -> Array:
    missing = [(0, full - length) for full, length in zip(port.type.shape, np.shape(array), strict=True)]
    return np.pad(array, missing) if any(behind for _, behind in missing) else np.asarray(array)


def _nobody(codes: Sequence[Code], request: Mapping[str, Array], *, with_states: bool) -> str:
    known = sorted({", ".join(port.name for port in inputs(code)) for code in codes})
    states = "with" if with_states else "without"
    return f"no program takes {', '.join(request) or 'nothing'} {states} states; the model's take {' or '.join(known)}"


def _too_long(found: Sequence[tuple[Code, Sizes]]) -> str:
    """By the largest program: it would have been the last chance."""
    code, sizes = max(found, key=lambda one: sum(port.type.nbytes for port in inputs(one[0])))
    name, full = _exceeded(code, sizes) or ("", 0)
    return (
        f"the request has a {name} of {sizes[name]}, and the model's largest program for it has {full}; shorten the "
        "request, or build the model with a larger bucket"
    )
