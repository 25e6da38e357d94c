"""Table of ONNX importers, and the interface of an importer.

An importer is a function of an `OnnxSite` and the node's operands, absent ones as None. It returns a value for each
of the node's results. Operators that are not in the table are decomposed where the ONNX standard defines them as
functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from nxpipe.emulator.capture.onnx.limits import BoundedBuilder
from nxpipe.emulator.capture.site import NotExpressible, Site
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array, settle
from nxpipe.emulator.ops import Convolution, Operator, Pool, result_type
from nxpipe.emulator.ops.portable import compute

Importer = Callable[..., Value | list[Value]]
_Importer = TypeVar("_Importer", bound=Importer)

IMPORTERS: dict[str, Importer] = {}

# Sizes are computed with small tables, and what follows from constants is computed here and now.
SMALL = 4096


class ValueNeeded(NotExpressible):
    """A size, or the like, depends on what an input holds, which a program with fixed shapes cannot allow."""

    def __init__(self, what: str, value: Value) -> None:
        super().__init__(f"its {what} is computed at run time; make it a constant of the model")
        self.value = value


def imports(*names: str) -> Callable[[_Importer], _Importer]:
    """Register an importer for ONNX operators by name."""

    def register(importer: _Importer) -> _Importer:
        for name in names:
            if name in IMPORTERS:
                raise ValueError(f"operator {name} has two importers")
            IMPORTERS[name] = importer
        return importer

    return register


@dataclass(frozen=True)
class OnnxSite(Site):
    """One node of an ONNX graph: its attributes, and how many of its results are wanted."""

    builder: BoundedBuilder
    operator: str
    attributes: Mapping[str, Any]
    opset: int
    wanted: int

    def emit(self, op: Operator, *operands: Value) -> Value:
        """Apply an operator; to small constants at once, so that arithmetic on shapes leaves no trace."""
        tables = [self.builder.table_of(operand) for operand in operands]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):
            return super().emit(op, *operands)
        type_ = result_type(op, tuple(operand.type for operand in operands))
        if type_.elements > SMALL or isinstance(op, Convolution | Pool):  # their padding is no arithmetic on shapes
            return super().emit(op, *operands)
        self.builder.step()
        self.builder.handle(sum(operand.type.elements for operand in operands) * 8)
        with np.errstate(all="ignore"):
            return self.builder.constant(settle(np.asarray(compute(op, *known)), type_.dtype), type_.dtype)

    def like(self, x: Value, number: float) -> Value:
        """A number in the element type of a value."""
        return self.builder.scalar(number, x.type.dtype)

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def table(self, what: str, value: Value) -> Array:
        """The numbers of a value that decides about shapes."""
        table = self.builder.table_of(value)
        if table is None:
            raise ValueNeeded(what, value)
        if table.size > SMALL:
            raise NotExpressible(f"its {what} is a table of {table.size:,} numbers, and the limit is {SMALL:,}")
        return table

    def numbers(self, name: str, operand: Value | None, default: Any = None) -> Any:
        """A list of integers that older operator sets have as an attribute and newer ones as an operand."""
        if operand is not None:
            return [int(number) for number in self.table(name, operand).reshape(-1)]
        return self.attributes.get(name, default)

    def axis(self, x: Value, default: int) -> int:
        return axis_in(self.attributes.get("axis", default), x.type.rank)

    def floats(self, x: Value) -> Value:
        return x if x.type.dtype.is_float else self.cast(x, DType.FLOAT32)


def axis_in(axis: int, rank: int) -> int:
    """ONNX counts axes from the end too; the graph does not."""
    if not -rank <= axis < max(rank, 1):
        raise NotExpressible(f"its axis {axis} does not exist in a tensor of rank {rank}")
    return axis % max(rank, 1)


def dtype_of(element: int) -> DType:
    """Our element type for ONNX's number of it."""
    import onnx

    try:
        return DType(onnx.helper.tensor_dtype_to_np_dtype(element).name)
    except (ValueError, KeyError):
        known = element in onnx.TensorProto.DataType.values()
        name = onnx.TensorProto.DataType.Name(element) if known else f"number {element}"
        raise NotExpressible(f"the hardware has no element type {name}; use float32 or an integer") from None
