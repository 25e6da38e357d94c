"""Records of the intermediate representation: values, nodes, their origins, and repeats.

A node applies an operator to values and defines exactly one value, so nodes and the values they define are the same
list read twice. Layers that repeat are stored once: a repeat marks a run of nodes as executed several times. Without
the marks the nodes are a sound graph, that of the first iteration; code that counts or executes reads
`ir.repeat.unroll(graph)`.
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
    """The place of a node in the user's model. It takes no part in the identity of a graph."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.module, self.source) if part)


NOWHERE = Origin()


@dataclass(frozen=True, slots=True)
class Node:
    """An operator applied to values, and the value that it defines."""

    result: Value
    op: Operator
    operands: tuple[Value, ...]
    origin: Origin = NOWHERE


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """Nodes `start` up to `stop` run `count` times. They are written as the first iteration runs them.

    `carried`: a value from before the run, and the one computed inside that stands in its place from the second
    iteration on. `taken`: a parameter or an input of the first iteration, and its counterparts in the later ones.
    `given`: a value computed inside, and names for what it was in each iteration. Seen from after the run, a value
    computed inside is what the last iteration made of it.
    """

    start: int
    stop: int
    count: int
    carried: Mapping[Value, Value]
    taken: Mapping[Value, tuple[Value, ...]]
    given: Mapping[Value, tuple[Value, ...]]
