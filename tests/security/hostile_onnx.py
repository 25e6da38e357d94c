"""Hostile ONNX files by number: equal numbers give equal files.

A valid model is damaged in one to four ways: fields of any message of the format, by its own description; nodes of any
standard operator with random attributes and operands; external tensors; nested bodies; and the bytes of the file.
"""

import os
import random
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from tests.security.onnx_files import (
    OWN,
    beside,
    body,
    branches,
    function,
    functions_in_functions,
    loops,
    model,
    node,
    projection,
    projection_in_function,
    single,
    table,
    weight,
)

_TEXTS: Final = (
    *("", ".", "..", "/", "x", "y", "w", "t", "v", "a", "b", "F", OWN, "ai.onnx", "ai.onnx.ml", "ai.onnx.training"),
    *("../secret/passwd", "/etc/passwd", "/dev/zero", "/proc/self/environ", "data.bin", "fifo", "link", "m.onnx"),
    *("\x1b]0;PWN\x07", "a\nb", "::error::x", "\0", "é", "\u202e", "{x}", "%s", "__import__('os').system('touch PWN')"),
    *("ctypes:cdll", "$(touch PWN)", "`touch PWN`", "n" * 3000, "Relu", "Loop", "If", "Scan", "Constant", "Add"),
)
_SIZES: Final = (
    *(0, 1, 2, 3, 7, 8, -1, -2, 255, 4096, 4097, 65_536, 10**6, 2**24, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1),
    *(-(2**31), -(2**63)),
)
_NUMBERS: Final = (0.0, -0.0, 1.0, 0.5, -3.0, 1e9, 1e300, float("inf"), float("-inf"), float("nan"), 1e-45)


def hostile(number: int, folder: Path) -> Path:
    """The file of this number and the files beside it, in an empty folder."""
    chance = random.Random(number)
    _furnish(folder)
    made = chance.choice(_BASES)()
    for _ in range(chance.randint(1, 4)):
        chance.choice(_WAYS)(chance, made)
    try:
        data = made.SerializeToString()
    except ValueError:  # the format cannot hold text that is not UTF-8
        data = made.graph.SerializePartialToString()
    path = folder / "m.onnx"
    path.write_bytes(_damaged(chance, data) if chance.random() < 0.15 else data)
    return path


def _furnish(folder: Path) -> None:
    """Write external data of the model, and other files to which a location may point."""
    (folder / "data.bin").write_bytes(np.arange(256, dtype=np.float32).tobytes())
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "sub").mkdir()


@cache
def _tables() -> tuple[Any, ...]:
    """Constants for sizes, axes, conditions and numbers of random nodes."""
    return (
        table("sizes", 2, 8),
        table("one", 1),
        table("many", *range(64)),
        table("none"),
        single("turns", 3),
        single("known", True),
        table("huge", 2**40, 2**40),
        weight("v", 8),
        weight("h", 2, 8),
        single("number", np.float32(0.5)),
        single("bytes", np.uint8(7)),
    )


def _everything() -> Any:
    """One layer of several kinds."""
    nodes = [
        node("MatMul", "x w", "m"),
        node("Softmax", "m", "s", axis=-1),
        node("Reshape", "s sizes", "r"),
        node("LayerNormalization", "r v", "n"),
        node("If", "known", "i", then_branch=_end("n", "it"), else_branch=_end("r", "ie")),
        node("F", "i", "f", domain=OWN),
        node("Gelu", "f", "y"),
    ]
    return model(nodes, [weight("w", 8, 8), *_tables()], functions=[function("F", [node("Relu", "a", "b")])])


def _end(given: str, made: str) -> Any:
    result = helper.make_tensor_value_info(made, TensorProto.FLOAT, None)
    return helper.make_graph([node("Neg", given, made)], "branch", [], [result])


def _image() -> Any:
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("MaxPool", "c", "p", kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", "p . . many", "q", mode="linear"),
        node("AveragePool", "q", "a", kernel_shape=[2, 2]),
        node("ConvTranspose", "a u", "t"),
        node("Pad", "t padding", "y", mode="reflect"),
    ]
    tables = [weight("w", 4, 2, 3, 3), weight("u", 4, 2, 2, 2), table("many", 1, 4, 8, 8)]
    tables += [table("padding", 0, 0, 1, 1, 0, 0, 1, 1)]
    return model(nodes, tables, inputs={"x": [1, 2, 8, 8]})


def _sequence() -> Any:
    nodes = [node("LSTM", "x w r", "h . c", hidden_size=4), node("Squeeze", "h", "s"), node("ReduceSum", "s", "y")]
    return model(nodes, [weight("w", 1, 16, 8), weight("r", 1, 16, 4)], inputs={"x": [5, 1, 8]})


def _small_integers() -> Any:
    nodes = [
        node("QuantizeLinear", "x scale zero", "q"),
        node("DequantizeLinear", "q scale zero", "d"),
        node("MatMulInteger", "q many", "i"),
        node("Cast", "i", "f", to=1),
        node("Add", "d f", "y"),
    ]
    zero = numpy_helper.from_array(np.uint8(3), "zero")
    whole = numpy_helper.from_array(np.ones((8, 8), np.uint8), "many")
    return model(nodes, [single("scale", np.float32(0.1)), zero, whole])


def _elsewhere() -> Any:
    return projection(beside(weight("w", 8, 4), "data.bin", offset=64, length=128))


def _elsewhere_in_function() -> Any:
    return projection_in_function(beside(weight("w", 8, 4), "data.bin", length=128))


def _scanned() -> Any:
    value = helper.make_tensor_value_info
    given = [value("state", 1, [8]), value("row", 1, [8])]
    nodes = [node("Add", "state row", "next"), node("Mul", "next row", "out")]
    inner = helper.make_graph(nodes, "body", given, [value("next", 1, None), value("out", 1, None)])
    return model([node("Scan", "v x", "last y", body=inner, num_scan_inputs=1)], [weight("v", 8)])


def _open() -> Any:
    return model([node("Relu", "x", "y")], inputs={"x": ["batch", None, 8]})


_BASES: Final[tuple[Callable[[], Any], ...]] = (
    *(
        _everything,
        _everything,
        _image,
        _sequence,
        _small_integers,
        _elsewhere,
        _elsewhere_in_function,
        _scanned,
        _open,
    ),
    *(lambda: loops(2, 3), lambda: functions_in_functions(4, 2), lambda: branches(4)),
)


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _any_field(chance: random.Random, made: Any) -> None:
    """Set one field of one message to an invalid value."""
    message = chance.choice(list(_messages(made)))
    field = chance.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None:
        _other_message(chance, made, message, field)
    elif field.is_repeated:
        held = getattr(message, field.name)
        if held and chance.random() < 0.5:
            held[chance.randrange(len(held))] = _value(chance, field)
        elif held and chance.random() < 0.5:
            del held[chance.randrange(len(held))]
        else:
            held.append(_value(chance, field))
    elif chance.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(chance, field))


def _other_message(chance: random.Random, made: Any, message: Any, field: Any) -> None:
    """Remove a message, duplicate it, or replace it by another of the model."""
    if chance.random() < 0.3:
        message.ClearField(field.name)
        return
    same = [entry for entry in _messages(made) if entry.DESCRIPTOR is field.message_type and entry is not message]
    copy = type(same[0])() if same else None
    if copy is None:
        return
    copy.CopyFrom(chance.choice(same))
    if field.is_repeated:
        getattr(message, field.name).append(copy)
    else:
        getattr(message, field.name).CopyFrom(copy)


def _value(chance: random.Random, field: Any) -> Any:
    kinds = {
        field.CPPTYPE_STRING: lambda: _text(chance, field),
        field.CPPTYPE_INT32: lambda: max(-(2**31), min(2**31 - 1, chance.choice(_SIZES))),
        field.CPPTYPE_INT64: lambda: chance.choice(_SIZES),
        field.CPPTYPE_UINT64: lambda: abs(chance.choice(_SIZES)),
        field.CPPTYPE_ENUM: lambda: chance.choice(field.enum_type.values).number,
        field.CPPTYPE_BOOL: lambda: chance.random() < 0.5,
    }
    make: Callable[[], Any] = kinds.get(field.cpp_type, lambda: chance.choice(_NUMBERS))
    return make()


def _text(chance: random.Random, field: Any) -> str | bytes:
    text = chance.choice(_TEXTS)
    return chance.choice([text.encode(), chance.randbytes(16)]) if field.type == field.TYPE_BYTES else text


@cache
def _schemas() -> tuple[Any, ...]:
    found = {schema.name: schema for schema in onnx.defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")}
    return tuple(found[name] for name in sorted(found))


def _any_node(chance: random.Random, made: Any) -> None:
    """Replace the result by a standard operator with random operands and attributes."""
    schema = chance.choice(_schemas())
    graph = chance.choice(
        [message for message in _messages(made) if message.DESCRIPTOR.name == "GraphProto"] or [made.graph]
    )
    place = chance.randint(0, len(graph.node))
    known = _known(made, graph, place) if chance.random() < 0.95 else list(_TEXTS)
    given = [chance.choice(known) for _ in range(_count(chance, schema.min_input, schema.max_input))]
    results = [f"r{chance.randrange(10**6)}" for _ in range(_count(chance, schema.min_output, schema.max_output))]
    fresh = NodeProto(op_type=schema.name, domain=schema.domain, input=given, output=results)
    for name, attribute in sorted(schema.attributes.items()):
        if attribute.required or chance.random() < 0.4:
            _attribute(chance, fresh.attribute.add(name=name), attribute, made)
    graph.node.insert(place, fresh)
    if results and chance.random() < 0.7:
        graph.node.add(op_type="Add", input=[results[0], chance.choice(known)], output=[f"{results[0]}s"])


def _known(made: Any, graph: Any, place: int) -> list[str]:
    """Names that a node at this place may read; adds constants of all kinds to the model."""
    there = {tensor.name for tensor in made.graph.initializer} | {
        output for n in made.graph.node for output in n.output
    }
    made.graph.initializer.extend(tensor for tensor in _tables() if tensor.name not in there)
    bodies = [made.graph] if graph is made.graph else [made.graph, graph]
    names = [entry.name for body_ in bodies for entry in (*body_.input, *body_.initializer)]
    return [*names, *(output for entry in graph.node[:place] for output in entry.output)]


def _count(chance: random.Random, least: int, most: int) -> int:
    return chance.randint(max(least - chance.choice((0, 0, 1)), 0), max(least, min(most, least + 3)))


def _attribute(chance: random.Random, attribute: Any, described: Any, made: Any) -> None:
    attribute.type = int(described.type)
    kind = described.type.name
    small = chance.random() < 0.6
    sizes = (0, 1, 2, 3, 1, 1) if small else _SIZES
    if kind == "INT":
        attribute.i = chance.choice(sizes)
    elif kind == "INTS":
        attribute.ints.extend(chance.choice(sizes) for _ in range(chance.randint(0, 4)))
    elif kind == "FLOAT":
        attribute.f = chance.choice(_NUMBERS)
    elif kind == "FLOATS":
        attribute.floats.extend(chance.choice(_NUMBERS) for _ in range(chance.randint(0, 4)))
    elif kind == "STRING":
        known = [
            str(word) for word in ("NOTSET", "SAME_UPPER", "VALID", "linear", "cubic", "nearest", "forward", "i,j->j")
        ]
        attribute.s = chance.choice([*known, chance.choice(_TEXTS)]).encode()
    elif kind == "TENSOR":
        attribute.t.CopyFrom(chance.choice([weight("t", 2), table("t", 1), beside(weight("t", 8), "../secret/passwd")]))
    elif kind == "GRAPH":
        attribute.g.CopyFrom(chance.choice([_end("x", "inner"), body([node("Relu", "v", "o_v")]), made.graph]))


def _moved_data(chance: random.Random, made: Any) -> None:
    """Let a tensor refer to bytes in some file."""
    tensors = [message for message in _messages(made) if message.DESCRIPTOR is TensorProto.DESCRIPTOR]
    if not tensors:
        return
    tensor = chance.choice(tensors)
    entries = {key: str(chance.choice((*_SIZES, "abc", "1e3", ""))) for key in ("offset", "length", "strange")}
    chosen = {key: value for key, value in entries.items() if chance.random() < 0.5}
    tensor.CopyFrom(beside(tensor, chance.choice(_TEXTS), **chosen))


def _nested(chance: random.Random, made: Any) -> None:
    """Put the graph into a loop, or into functions that call each other."""
    if chance.random() < 0.5:
        whole = type(made.graph)()
        whole.CopyFrom(made.graph)
        fresh = made.graph.node.add(op_type=chance.choice(("Loop", "If", "Scan", "SequenceMap")), output=["nested"])
        fresh.input.extend(
            chance.choice([*(tensor.name for tensor in _tables()), "x", ""]) for _ in range(chance.randint(1, 4))
        )
        fresh.attribute.add(name=chance.choice(("body", "then_branch", "else_branch")), type=5).g.CopyFrom(whole)
        return
    names = ["F", "G", "H"]
    for name in names:
        made.functions.append(function(name, [node(chance.choice(names), "a", "b", domain=OWN)]))
    made.graph.node.append(node(chance.choice(names), "x", "called", domain=OWN))


def _grown(chance: random.Random, made: Any) -> None:
    """Change the numbers of a constant that determines sizes or iterations."""
    tables = [entry for entry in made.graph.initializer if entry.data_type == TensorProto.INT64]
    if tables:
        tensor = chance.choice(tables)
        count = max(len(tensor.raw_data) // 8, 1)
        few = chance.choices((0, 1, 2, 5, 4096, *_SIZES), k=count)
        tensor.raw_data = struct.pack(f"<{count}q", *few)


_WAYS: Final[tuple[Callable[[random.Random, Any], None], ...]] = (
    *([_any_field] * 8),
    *([_any_node] * 6),
    *([_moved_data] * 2),
    *([_grown] * 2),
    _nested,
)


def _damaged(chance: random.Random, data: bytes) -> bytes:
    """Damage the bytes of the file: flipped, cut, doubled, or with a wrong length."""
    broken = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        if not broken:
            break
        at, upto = sorted(chance.choices(range(len(broken) + 1), k=2))
        way = chance.randrange(5)
        if way == 0 and at < len(broken):
            broken[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            del broken[at:]
        elif way == 2:
            broken[at:at] = broken[at:upto][:4096]
        elif way == 3:
            broken[at:at] = chance.choice(
                (b"\xff" * 9 + b"\x01", b"\x3a\xff\xff\xff\xff\x07", b"\x0b" * 200, b"\x3a\x02")
            )
        else:
            del broken[at : at + chance.randint(1, 16)]
    return bytes(broken)
