"""Records of the intermediate representation: values, nodes, their origins, and repeats.

A node applies an operator to values and defines exactly one value. Repeated layers are stored once: a repeat marks a
range of nodes as executed several times. Without repeats, the nodes are a valid graph, that of the first iteration.
Code that counts or executes nodes uses `ir.repeat.unroll(graph)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nxpipe.emulator.ir.types import TensorType
from nxpipe.emulator.ops.base import Operator


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor in a graph, defined once."""

    id: int
    type: TensorType


@dataclass(frozen=True, slots=True)
class Origin:
    """The module and source line in the user's model that a node comes from. It is not part of the graph's key."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.module, self.source) if part)


NOWHERE = Origin()


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, its operands, and the value that the node defines."""

    result: Value
    op: Operator
    operands: tuple[Value, ...]
    origin: Origin = NOWHERE


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """A loop: nodes `start` up to `stop` run `count` times. The nodes are those of the first iteration.

    `carried` (loop-carried values): from a value before the loop to the value inside that replaces it from the second
    iteration on. `taken`: from a parameter or input of the first iteration to its counterparts in later iterations.
    `given`: from a value inside to its values in each iteration, for readers after the loop. A reader after the loop
    that uses a value inside directly reads its value in the last iteration.
    """

    start: int
    stop: int
    count: int
    carried: Mapping[Value, Value]
    taken: Mapping[Value, tuple[Value, ...]]
    given: Mapping[Value, tuple[Value, ...]]
