"""Attributes of nodes, and operators that are defined by simpler ones: in the model, or in the ONNX standard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from nxpipe.emulator.ir.nodes import Value


@dataclass(frozen=True)
class Call:
    """What a function's nodes may refer to: attributes of the node that calls it, and the function's own defaults."""

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any, given: Mapping[str, Any]) -> "Call":
        return cls(given, {attribute.name: attribute for attribute in function.attribute_proto})


NO_CALL = Call({}, {})

_OBJECT = 64  # bytes of a Python number and its places in lists, about


def filled(node: Any, call: Call) -> Any:
    """The node with each attribute that refers to one of the caller's, or to a default, in that one's place."""
    if not any(attribute.ref_attr_name for attribute in node.attribute):
        return node
    whole = onnx.NodeProto()
    whole.CopyFrom(node)
    del whole.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            whole.attribute.append(attribute)
        elif attribute.ref_attr_name in call.given:
            whole.attribute.append(onnx.helper.make_attribute(attribute.name, call.given[attribute.ref_attr_name]))
        elif attribute.ref_attr_name in call.defaults:
            default = whole.attribute.add()
            default.CopyFrom(call.defaults[attribute.ref_attr_name])
            default.name = attribute.name
    return whole


def attributes_of(node: Any) -> dict[str, Any]:
    """Attributes by name; text as text."""
    found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {
        name: value.decode() if isinstance(value, bytes) else list(value) if _is_list(value) else value
        for name, value in found.items()
    }


def bytes_in(node: Any) -> int:
    """The numbers and texts in a node's attributes, which are copied each time that it is read."""
    return sum(_OBJECT * (len(each.floats) + len(each.ints)) + len(each.s) for each in node.attribute)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def taken_apart(node: Any, operands: Sequence[Value | None], opset: int) -> Any:
    """The ONNX standard's own definition of an operator by simpler ones, if it has one."""
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
