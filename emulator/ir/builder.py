"""Graph construction: assigns value numbers, and infers the type of each node by its operator's shape rule."""

from collections.abc import Mapping, Sequence

import numpy as np

from nxpipe.emulator.errors import GraphInvalid
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import NOWHERE, Node, Origin, Repeat, Value
from nxpipe.emulator.ir.repeat import require_sound_repeats
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array, settle
from nxpipe.emulator.ops.base import Operator, result_type


class GraphBuilder:
    """Builder of a graph: collects inputs, parameters, constants, nodes and outputs in the order of the calls."""

    def __init__(self) -> None:
        self._inputs: dict[str, Value] = {}
        self._parameters: dict[str, Value] = {}
        self._constants: dict[Value, Array] = {}
        self._constant_of: dict[tuple[TensorType, bytes], Value] = {}
        self._nodes: dict[Value, Node] = {}
        self._outputs: dict[str, Value] = {}
        self._repeats: list[Repeat] = []
        self._count = 0

    def _fresh(self, type_: TensorType) -> Value:
        self._count += 1
        return Value(self._count - 1, type_)

    def input(self, name: str, type_: TensorType) -> Value:
        if name in self._inputs:
            raise GraphInvalid(f"the graph has two inputs named {name!r}")
        return self._inputs.setdefault(name, self._fresh(type_))

    def parameter(self, name: str, type_: TensorType) -> Value:
        """The parameter with this name, declared at the first call."""
        declared = self._parameters.get(name)
        if declared is None:
            declared = self._parameters[name] = self._fresh(type_)
        if declared.type != type_:
            raise GraphInvalid(f"parameter {name!r} is used both as {declared.type} and as {type_}")
        return declared

    def constant(self, data: Array, dtype: DType) -> Value:
        """A constant table; equal tables are one value."""
        table = np.ascontiguousarray(settle(np.asarray(data), dtype)).reshape(np.shape(data))
        type_ = TensorType(table.shape, dtype)
        content = (type_, table.tobytes())
        if content not in self._constant_of:
            value = self._constant_of[content] = self._fresh(type_)
            table = table.copy()
            table.flags.writeable = False
            self._constants[value] = table
        return self._constant_of[content]

    def scalar(self, number: float, dtype: DType | None = None) -> Value:
        """A Python number as a constant of rank 0."""
        natural = {bool: DType.BOOL, int: DType.INT64}.get(type(number), DType.FLOAT32)
        return self.constant(np.asarray(number), dtype or natural)

    def add(self, op: Operator, *operands: Value, origin: Origin = NOWHERE) -> Value:
        """Apply an operator; raises IllTyped if its shape rule rejects the operands."""
        result = self._fresh(result_type(op, tuple(operand.type for operand in operands)))
        self._nodes[result] = Node(result, op, operands, origin)
        return result

    def repeat(
        self,
        span: tuple[int, int, int],
        carried: Mapping[Value, Value],
        taken: Mapping[Value, tuple[Value, ...]],
        given: Sequence[Value],
    ) -> list[Value]:
        """Mark nodes [start, stop) as a repeat of `count` iterations; returns each `given` value in each iteration."""
        start, stop, count = span
        iterations = {value: tuple(self._fresh(value.type) for _ in range(count)) for value in given}
        self._repeats.append(Repeat(start, stop, count, carried, taken, iterations))
        return [value for row in iterations.values() for value in row]

    def output(self, name: str, value: Value) -> None:
        if name in self._outputs:
            raise GraphInvalid(f"the graph has two outputs named {name!r}")
        self._outputs[name] = value

    def node_of(self, value: Value) -> Node | None:
        """The node that defines a value; None for inputs, parameters and constants."""
        return self._nodes.get(value)

    def is_input(self, value: Value) -> bool:
        return value in self._inputs.values()

    def table_of(self, value: Value) -> Array | None:
        """The table of a constant; None for other values."""
        return self._constants.get(value)

    def build(self) -> Graph:
        nodes, repeats = tuple(self._nodes.values()), tuple(self._repeats)
        graph = Graph(self._inputs, self._parameters, self._constants, nodes, self._outputs, repeats)
        require_sound_repeats(graph)
        return graph
