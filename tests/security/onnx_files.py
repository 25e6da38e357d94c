"""Small generated ONNX files: valid ones, and those of the security review."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None]

OWN = "mine"  # the domain of the model's functions


def model(
    nodes: Sequence[Any],
    weights: Sequence[Any] = (),
    *,
    inputs: dict[str, Shape] | None = None,
    outputs: Sequence[str] = ("y",),
    functions: Sequence[Any] = (),
    dtype: int = TensorProto.FLOAT,
) -> Any:
    declared = [helper.make_tensor_value_info(n, dtype, s) for n, s in (inputs or {"x": [2, 8]}).items()]
    results = [helper.make_tensor_value_info(name, dtype, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", declared, results, list(weights))
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(OWN, 1)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=9)


def node(kind: str, given: str, made: str, **attributes: Any) -> Any:
    """A node; `given` and `made` are names separated by spaces, a point stands for an omitted operand."""

    def names(text: str) -> list[str]:
        return ["" if name == "." else name for name in text.split()]

    return helper.make_node(kind, names(given), names(made), **attributes)


def weight(name: str, *shape: int, seed: int = 0) -> Any:
    return numpy_helper.from_array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), name)


def table(name: str, *numbers: int) -> Any:
    return numpy_helper.from_array(np.asarray(numbers, np.int64), name)


def single(name: str, number: Any) -> Any:
    return numpy_helper.from_array(np.asarray(number), name)


def beside(tensor: Any, location: str, **entries: object) -> Any:
    """The tensor with its bytes in a file, which is not written here."""
    found = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    found.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        found.external_data.add(key=key, value=str(value))
    return found


def function(name: str, nodes: Sequence[Any], given: Sequence[str] = ("a",), made: Sequence[str] = ("b",)) -> Any:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(OWN, 1)]
    return helper.make_function(OWN, name, list(given), list(made), list(nodes), imports)


def saved(made: Any, folder: Path, name: str = "m.onnx") -> Path:
    (folder / name).write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return folder / name


def projection(tensor: Any) -> Any:
    """x times a weight."""
    return model([node("MatMul", "x w", "y")], [tensor])


def projection_in_function(tensor: Any) -> Any:
    """The same, with the weight in a Constant of a function."""
    body = [node("Constant", "", "w", value=tensor), node("MatMul", "a w", "b")]
    return model([node("F", "x", "y", domain=OWN)], functions=[function("F", body)])


def body(nodes: Sequence[Any], carried: str = "v") -> Any:
    """A loop's body, which passes a value of its own to the next iteration."""
    value = helper.make_tensor_value_info
    given = [value(f"i_{carried}", TensorProto.INT64, []), value(f"c_{carried}", TensorProto.BOOL, [])]
    made = [value(f"d_{carried}", TensorProto.BOOL, []), value(f"o_{carried}", TensorProto.FLOAT, None)]
    every = [node("Identity", f"c_{carried}", f"d_{carried}"), *nodes]
    return helper.make_graph(every, "body", [*given, value(carried, TensorProto.FLOAT, None)], made)


def loops(depth: int, turns: int) -> Any:
    """Nested loops; the innermost adds a number."""
    inner = body([node("Relu", f"v{depth}", f"o_v{depth}")], f"v{depth}")
    for level in range(depth - 1, 0, -1):
        inner = body([node("Loop", f"turns . v{level}", f"o_v{level}", body=inner)], f"v{level}")
    return model([node("Loop", "turns . x", "y", body=inner)], [single("turns", turns)])


def functions_in_functions(depth: int, calls: int) -> Any:
    """Functions each of which calls the next one several times."""
    made = []
    for level in range(depth):
        names = ["a", *(f"t{i}" for i in range(calls - 1)), "b"]
        last = level == depth - 1
        steps = [
            node("Relu" if last else f"F{level + 1}", f"{names[i]}", names[i + 1], domain="" if last else OWN)
            for i in range(calls)
        ]
        made.append(function(f"F{level}", steps))
    return model([node("F0", "x", "y", domain=OWN)], functions=made)


def branches(depth: int) -> Any:
    def graph(level: int, side: str) -> Any:
        name = f"{side}{level}"
        result = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
        inner = node("Relu", "x", name) if level == depth else choice(level + 1, name, side)
        return helper.make_graph([inner], name, [], [result])

    def choice(level: int, made: str, side: str = "") -> Any:
        end = helper.make_graph(
            [node("Neg", "x", f"e{side}{level}")], "e", [], [helper.make_tensor_value_info(f"e{side}{level}", 1, None)]
        )
        return node("If", "known", made, then_branch=graph(level, f"{side}t"), else_branch=end)

    return model([choice(1, "y")], [single("known", True)])


def chain(length: int, kind: str = "Relu") -> bytes:
    """A chain of nodes as bytes, because a million nodes are slow otherwise."""
    value = model([], outputs=("y",)).graph
    made = ["x", *(f"n{i}" for i in range(length - 1)), "y"]
    nodes = b"".join(
        field(1, field(1, made[i].encode()) + field(2, made[i + 1].encode()) + field(4, kind.encode()))
        for i in range(length)
    )
    whole = model([])
    whole.ClearField("graph")
    return bytes(whole.SerializeToString()) + field(7, value.SerializeToString() + nodes)


def field(number: int, data: bytes) -> bytes:
    """A message or text in the protobuf encoding: number, length, bytes."""
    size, count = b"", len(data)
    while count > 127:
        size, count = size + bytes([count & 127 | 128]), count >> 7
    return bytes([number << 3 | 2]) + size + bytes([count]) + data


Recipe = Callable[[Path], Any]
