"""One graph two ways: `emulator.fast`, and its module on XLA's CPU; and how far apart the two may be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

import numpy as np

from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.hlo.xla import LoadedModule
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.fast import degree_of, execute
from tests.emulator.divided_models import execute_ranks
from tests.lower.harness import Case, unit
from tests.lower.sweep import Draw, Row
from tests.lower.test_every_operator import ROWS

# Units of the last place, and an absolute bound, by row of the tables of tests/lower: where XLA's functions, its order
# of additions, its fused multiply-adds or its subnormal numbers (zeros) differ from numpy's. Rows without an entry have
# the bounds of their tables.
TINY: Final = 1.2e-38
BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("exp", "rsqrt", "sigmoid", "silu"), (6, TINY)),
    "softplus": (12, TINY),
    **dict.fromkeys(("atan", "erf", "log", "log1p", "tanh"), (6, 0)),
    "expm1": (8, 0),
    **dict.fromkeys(("gelu", "gelu_tanh"), (4, 2e-6)),
    **dict.fromkeys(("cumprod", "cumsum"), (1, 2e-3)),
    **dict.fromkeys(("resample_cubic", "resample_linear", "sum_pool"), (1, 1e-4)),
}


@dataclass(frozen=True)
class Distance:
    """The largest difference of an element: in units of its last place, absolutely, and as a part of its bound."""

    units: float = 0.0
    absolute: float = 0.0
    part: float = 0.0

    def worst(self, other: "Distance") -> "Distance":
        return Distance(*(max(getattr(self, name), getattr(other, name)) for name in ("units", "absolute", "part")))


def drawn_case(row: Row, chance: Random) -> Case:
    draw = Draw(chance)
    return draw.case(row.draw(draw))


def distance_on_xla(case: Case, units: float, noise: float) -> Distance:
    """The largest distance of XLA's results from those of `fast`; a part above 1 exceeds the bounds."""
    degree = degree_of(case.graph)
    expected = (execute if degree == 1 else execute_ranks)(case.graph, case.parameters, case.inputs)
    module = module_of(case.graph, degree)
    found, states = LoadedModule(module.text, module.interface, case.parameters).run(case.inputs)
    found |= states[0]
    assert found.keys() == expected.keys()
    worst = Distance()
    for name, value in case.graph.outputs.items():
        worst = worst.worst(distance(found[name], expected[name], value.type.dtype, units, noise))
    return worst


def distance(found: Array, expected: Array, dtype: DType, units: float, noise: float) -> Distance:
    assert found.shape == expected.shape
    if not expected.size:
        return Distance()
    if not dtype.is_float:
        is_equal = bool(np.array_equal(found.astype(expected.dtype), expected))
        return Distance() if is_equal else Distance(math.inf, math.inf, math.inf)
    with np.errstate(all="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        apart = np.where(same, 0, np.abs(found.astype(np.float64) - expected))
        apart = np.where(np.isnan(apart), np.inf, apart)
        places = unit(expected, dtype)
        part = np.where(apart == 0, 0, apart / (units * places + noise))
        return Distance(
            float(np.max(apart / places, where=apart > 0, initial=0)), float(apart.max()), float(part.max())
        )


def bounds(row: Row) -> tuple[float, float]:
    """How far a row's results may be off."""
    return BOUNDS.get(row.name, (row.units, row.noise))


def bounds_table() -> str:
    """As docs/reference/hlo.md has them: the rows whose results may differ, by how far."""
    rows: dict[tuple[float, float], list[str]] = {}
    for row in ROWS:
        if any(bounds(row)):
            rows.setdefault(bounds(row), []).append(row.name)
    lines = ["| units | absolute | operators |", "| --- | --- | --- |"]
    lines += [f"| {units:g} | {noise:.1g} | {', '.join(sorted(rows[units, noise]))} |" for units, noise in sorted(rows)]
    return "\n".join(lines)
