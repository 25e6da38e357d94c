"""Table of ATen importers, and the interface of an importer.

An importer is a function of a `Site` (one call in the traced program) and the call's arguments in the order of the
operator's schema, defaults filled in, tensors already values of the graph. The result type that PyTorch computed is
known, so shapes such as `view(-1, 64)` need no arithmetic here.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from nxpipe.emulator.capture.site import NotExpressible, Site, given
from nxpipe.emulator.ir.nodes import Value

__all__ = [
    "NotExpressible",
    "Site",
    "along_an_axis",
    "axes_of",
    "axis_of",
    "given",
    "importer_of",
    "imports",
    "is_known",
    "states_a_fact",
]

Importer = Callable[..., Value | list[Value]]
_Importer = TypeVar("_Importer", bound=Importer)

_IMPORTERS: dict[str, Importer] = {}


def imports(*names: str) -> Callable[[_Importer], _Importer]:
    """Register an importer for ATen operators: by name (`add`), or for one overload of it (`sum.dim_IntList`)."""

    def register(importer: _Importer) -> _Importer:
        for name in names:
            if name in _IMPORTERS:
                raise ValueError(f"operator {name} has two importers")
            _IMPORTERS[name] = importer
        return importer

    return register


def along_an_axis(importer: Importer) -> Importer:
    """Where an axis is named, PyTorch takes a scalar for a vector of one element."""

    @wraps(importer)
    def of_vectors(site: Site, x: Value, *more: Any) -> Value | list[Value]:
        if x.type.rank:
            return importer(site, x, *more)
        scalars = [isinstance(operand, Value) and not operand.type.rank for operand in more]
        vectors = [site.reshape(o, (1,)) if scalar else o for o, scalar in zip(more, scalars, strict=True)]
        found = importer(site, site.reshape(x, (1,)), *vectors)
        if not isinstance(found, list):
            return site.reshape(found, site.result.shape)
        return [site.reshape(part, type_.shape) for part, type_ in zip(found, site.results, strict=False)]

    return of_vectors


def importer_of(target: Any) -> Importer | None:
    """The importer of an operator overload, the overload's own before that of all overloads.

    Libraries' own operators go by their full names, as in `transformers::grouped_mm_fallback`.
    """
    packet, _, overload = target.name().removeprefix("aten::").partition(".")
    return _IMPORTERS.get(f"{packet}.{overload or 'default'}") or _IMPORTERS.get(packet)


def is_known(target: Any) -> bool:
    """Whether the importer takes this operator as it is; assertions it takes by leaving them out."""
    return importer_of(target) is not None or states_a_fact(target)


def states_a_fact(target: Any) -> bool:
    """Assertions and sizes: what they say about shapes and types, the shape rules establish anyway."""
    return str(target.name()).startswith(("aten::_assert", "aten::sym_"))


def axis_of(x: Value, axis: int) -> int:
    """PyTorch counts axes from the end too; the graph does not."""
    return axis % max(x.type.rank, 1)


def axes_of(x: Value, axes: Sequence[int] | int | None) -> tuple[int, ...]:
    """The axes of a reduction in order; none means all."""
    if isinstance(axes, int):
        axes = (axes,)
    return tuple(sorted(axis_of(x, axis) for axis in axes)) if axes and x.type.rank else tuple(range(x.type.rank))
