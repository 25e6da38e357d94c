"""Table of ONNX importers, and the interface of an importer.

An importer is a function of an `OnnxSite` and the node's operands, with None for absent ones. It returns the values of
the node's results. Operators without an importer are decomposed if the ONNX standard defines them as functions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx

from nxpipe.emulator.capture.onnx.limits import LOOP_ITERATIONS, BoundedBuilder
from nxpipe.emulator.capture.site import NotExpressible, Site
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType
from nxpipe.emulator.numerics import Array, settle
from nxpipe.emulator.ops import Concat, Convolution, Operator, Pool, result_type
from nxpipe.emulator.ops.portable import compute

Importer = Callable[..., Value | list[Value]]
_Importer = TypeVar("_Importer", bound=Importer)

IMPORTERS: dict[str, Importer] = {}

# Elements: operators on smaller constants are folded during import, because shapes are computed with them.
SMALL = 4096


class ValueNeeded(NotExpressible):
    """A size or another static argument depends on the value of an input; shapes must be static."""

    def __init__(self, argument: str, value: Value) -> None:
        super().__init__(f"its {argument} is computed at run time; make it a constant of the model")
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
    """One node of an ONNX graph: its attributes, and the number of its named results."""

    builder: BoundedBuilder
    operator: str
    attributes: Mapping[str, Any]
    opset: int
    result_count: int

    def emit(self, op: Operator, *operands: Value) -> Value:
        """Add an operator to the graph; on small constants it is folded, so that shape arithmetic adds no nodes."""
        tables = [self.builder.table_of(operand) for operand in operands]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):
            return super().emit(op, *operands)
        type_ = result_type(op, tuple(operand.type for operand in operands))
        if type_.elements > SMALL or isinstance(op, Convolution | Pool):  # no shape arithmetic
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

    def table(self, argument: str, value: Value) -> Array:
        """The value of a constant operand that determines shapes; ValueNeeded if it is not constant."""
        table = self.builder.table_of(value)
        if table is None:
            raise ValueNeeded(argument, value)
        if table.size > SMALL:
            raise NotExpressible(f"its {argument} is a table of {table.size:,} numbers, and the limit is {SMALL:,}")
        return table

    def numbers(self, name: str, operand: Value | None, default: Any = None) -> Any:
        """A list of integers: an attribute in older operator sets, an operand in newer ones."""
        if operand is not None:
            return [int(number) for number in self.table(name, operand).reshape(-1)]
        return self.attributes.get(name, default)

    def axis(self, x: Value, default: int) -> int:
        return axis_in(self.attributes.get("axis", default), x.type.rank)

    def floats(self, x: Value) -> Value:
        return x if x.type.dtype.is_float else self.cast(x, DType.FLOAT32)


def axis_in(axis: int, rank: int) -> int:
    """A non-negative axis for an ONNX axis, which may count from the end."""
    if not -rank <= axis < max(rank, 1):
        raise NotExpressible(f"its axis {axis} does not exist in a tensor of rank {rank}")
    return axis % max(rank, 1)


def dtype_of(element: int) -> DType:
    """The element type of an ONNX data type number."""
    import onnx

    try:
        return DType(onnx.helper.tensor_dtype_to_np_dtype(element).name)
    except (ValueError, KeyError):
        known = element in onnx.TensorProto.DataType.values()
        name = onnx.TensorProto.DataType.Name(element) if known else f"number {element}"
        raise NotExpressible(f"the hardware has no element type {name}; use float32 or an integer") from None


@dataclass(frozen=True)
class SubgraphCall:
    """The attributes that a function's nodes may refer to: those of the calling node, and the function's defaults."""

    attributes: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any, attributes: Mapping[str, Any]) -> "SubgraphCall":
        return cls(attributes, {attribute.name: attribute for attribute in function.attribute_proto})


NO_CALL = SubgraphCall({}, {})

_OBJECT = 64  # approximate bytes of a Python number and its references in lists


def resolve_references(node: Any, call: SubgraphCall) -> Any:
    """The node with references to attributes of the calling node, or to defaults, replaced by their values."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    resolved = onnx.NodeProto()
    resolved.CopyFrom(node)
    del resolved.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            resolved.attribute.append(attribute)
        elif attribute.ref_attr_name in call.attributes:
            resolved.attribute.append(
                onnx.helper.make_attribute(attribute.name, call.attributes[attribute.ref_attr_name])
            )
        elif attribute.ref_attr_name in call.defaults:
            default = resolved.attribute.add()
            default.CopyFrom(call.defaults[attribute.ref_attr_name])
            default.name = attribute.name
    return resolved


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of a node by name; strings are decoded."""
    values = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {
        name: value.decode() if isinstance(value, bytes) else list(value) if _is_list(value) else value
        for name, value in values.items()
    }


def attribute_bytes(node: Any) -> int:
    """The memory of a node's attributes in Python, which are copied each time that the node is read."""
    return sum(_OBJECT * (len(field.floats) + len(field.ints)) + len(field.s) for field in node.attribute)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def decompose(node: Any, operands: Sequence[Value | None], opset: int) -> Any:
    """The ONNX standard's definition of an operator as a function, or None."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None
    if schema.has_function:
        body = schema.function_body
    elif schema.has_context_dependent_function:
        types = [_type_proto(operand).SerializeToString() for operand in operands]
        data = schema.get_context_dependent_function_with_opset_version(opset, _as_bytes(node), types)
        body = onnx.FunctionProto()
        body.ParseFromString(data)
    else:
        return None
    complete = onnx.FunctionProto()
    complete.CopyFrom(body)
    for attribute in schema.attributes.values():
        if attribute.default_value.name:
            complete.attribute_proto.append(attribute.default_value)
    return complete


def _as_bytes(node: Any) -> bytes:
    return bytes(node.SerializeToString())


def _type_proto(value: Value | None) -> Any:
    if value is None:
        return onnx.TypeProto()
    element = onnx.helper.np_dtype_to_tensor_dtype(value.type.dtype.stored)
    return onnx.helper.make_tensor_type_proto(element, value.type.shape)


# Imports the body in an attribute with the values of its inputs; returns those of its outputs.
Body = Callable[[Any, Sequence[Value]], list[Value]]


def branch(site: OnnxSite, run: Body, condition: Value) -> list[Value]:
    table = site.builder.table_of(condition)
    if table is None:
        raise NotExpressible("it branches on a tensor's value, which a compiled program cannot; use Where")
    return run(site.attribute("then_branch" if table.reshape(-1)[0] else "else_branch"), ())


def loop(site: OnnxSite, run: Body, trips: Value | None, condition: Value | None, *carried: Value) -> list[Value]:
    """Unroll a loop: up to the trip count, while the condition is true."""
    body = site.attribute("body")
    limit = None if trips is None else int(site.table("trip count", trips).item())
    proceed = condition if condition is not None else site.builder.scalar(True)
    state, collected, count = list(carried), list[list[Value]](), 0
    while site.table("condition", proceed).item() and (limit is None or count < limit):
        if count >= LOOP_ITERATIONS:
            raise NotExpressible(f"it runs more than {LOOP_ITERATIONS:,} times; use an operator on whole tensors")
        proceed, *results = run(body, (site.builder.scalar(count, DType.INT64), proceed, *state))
        state, scanned = results[: len(carried)], results[len(carried) :]
        collected.append(scanned)
        count += 1
    return [*state, *_stacked(site, collected, [0] * (len(body.output) - 1 - len(carried)), [0] * len(body.output))]


def scan(site: OnnxSite, run: Body, *operands: Value) -> list[Value]:
    """Unroll a scan along an axis; the results of the steps are stacked."""
    if site.opset < 9:
        raise NotExpressible("before operator set 9 it scans batches of different lengths; export for a newer one")
    body, scanned = site.attribute("body"), site.attribute("num_scan_inputs")
    if not 1 <= scanned <= len(operands):
        raise NotExpressible(f"it scans {scanned} of its {len(operands)} operands")
    state, inputs = list(operands[:-scanned]), operands[-scanned:]
    yields = len(body.output) - len(state)
    raw_axes = site.attribute("scan_input_axes", [0] * scanned)
    axes = [axis_in(axis, x.type.rank) for axis, x in zip(raw_axes, inputs, strict=True)]
    backwards = site.attribute("scan_input_directions", [0] * scanned)
    length, states = inputs[0].type.shape[axes[0]], len(state)
    collected: list[list[Value]] = []
    for step in range(length):
        slices = [
            _step(site, x, axis, length - 1 - step if back else step)
            for x, axis, back in zip(inputs, axes, backwards, strict=True)
        ]
        results = run(body, (*state, *slices))
        state = results[:states]
        collected.append(results[states:])
    out_axes = site.attribute("scan_output_axes", [0] * yields)
    return [*state, *_stacked(site, collected, out_axes, site.attribute("scan_output_directions", [0] * yields))]


def _step(site: OnnxSite, x: Value, axis: int, place: int) -> Value:
    shape = x.type.shape
    return site.reshape(site.slice(x, axis, place, place + 1), (*shape[:axis], *shape[axis + 1 :]))


def _stacked(
    site: OnnxSite, collected: Sequence[Sequence[Value]], axes: Sequence[int], backwards: Sequence[int]
) -> list[Value]:
    if axes and not collected:
        raise NotExpressible("it runs zero times, so the shape of its stacked results is unknown")
    results = []
    for parts, raw_axis, back in zip(zip(*collected, strict=True), axes, backwards, strict=False):
        shape = parts[0].type.shape
        axis = axis_in(raw_axis, len(shape) + 1)
        rows = [site.reshape(part, (*shape[:axis], 1, *shape[axis:])) for part in parts]
        results.append(site.emit(Concat(axis), *(rows[::-1] if back else rows)))
    return results


CONTROL: dict[str, Callable[..., list[Value]]] = {"If": branch, "Loop": loop, "Scan": scan}
