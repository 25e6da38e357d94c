"""Bytes, keys and text of graphs."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.emulator.errors import GraphInvalid, IllTyped
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Node, Origin, Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Binary, Cast, LayerNorm, Linear, Reshape, Softmax, Unary
from tests.tiers import examples

F32 = DType.FLOAT32


def small_graph(epsilon: float = 1e-5, module: str = "mlp", detour: bool = False) -> Graph:
    """A linear layer, a norm and a softmax; the detour computes an unused value."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3), F32))
    weight = builder.parameter("mlp.weight", TensorType((4, 3), F32))
    if detour:
        builder.add(Unary("exp"), x)
    y = builder.add(Linear(F32), x, weight, origin=Origin(module, "model.py:3"))
    y = builder.add(LayerNorm(1, epsilon), y, origin=Origin(f"{module}.norm", "model.py:4"))
    y = builder.add(Binary("add"), y, builder.constant(np.arange(4) / 3, DType.BFLOAT16))
    y = builder.add(Binary("multiply"), y, builder.scalar(0.1))
    builder.output("y", builder.add(Softmax(1, log=False), y))
    builder.output("x as half", builder.add(Cast(DType.FLOAT16), x))
    return builder.build()


def test_a_graph_survives_its_bytes() -> None:
    graph = small_graph()
    again = decode(graph.to_bytes())
    assert again.to_bytes() == graph.to_bytes()
    assert str(again) == str(graph)
    assert again.key == graph.key
    for ours, theirs in zip(graph.constants.values(), again.constants.values(), strict=True):
        assert np.array_equal(ours, theirs)


def test_a_graph_reads_pleasantly() -> None:
    assert str(small_graph()) == (
        "graph(x: f32[2,3])\n"
        "  c0: bf16[4] = constant\n"
        "  %0: f32[2,4] = linear(x, w:mlp.weight)  # mlp model.py:3\n"
        "  %1: f32[2,4] = layer_norm(%0, axes=1, epsilon=1e-05)  # mlp.norm model.py:4\n"
        "  %2: f32[2,4] = add(%1, c0)\n"
        "  %3: f32[2,4] = multiply(%2, 0.1)\n"
        "  %4: f32[2,4] = softmax(%3, axis=1, log=False)\n"
        "  %5: f16[2,3] = cast(x)\n"
        "return y=%4, x as half=%5"
    )


def test_provenance_changes_the_bytes_but_not_the_key() -> None:
    assert small_graph(module="mlp").to_bytes() != small_graph(module="head").to_bytes()
    assert small_graph(module="mlp").key == small_graph(module="head").key


def test_dead_code_and_numbering_do_not_change_the_key() -> None:
    assert small_graph(detour=True).key == small_graph().key


def test_the_order_of_independent_nodes_does_not_change_the_key() -> None:
    graph = small_graph()
    last = graph.nodes[-1]
    assert replace(graph, nodes=(last, *graph.nodes[:-1])).key == graph.key


def test_an_attribute_changes_the_key() -> None:
    assert small_graph(epsilon=1e-5).key != small_graph(epsilon=1.0000000001e-5).key


def test_names_of_the_interface_change_the_key() -> None:
    graph = small_graph()
    renamed = replace(graph, parameters={"other.weight": next(iter(graph.parameters.values()))})
    assert renamed.key != graph.key


def test_a_constant_changes_the_key() -> None:
    keys = set()
    for number in (0.0, -0.0, 1.0):
        builder = GraphBuilder()
        x = builder.input("x", TensorType((2,), F32))
        builder.output("y", builder.add(Binary("add"), x, builder.scalar(number)))
        keys.add(builder.build().key)
    assert len(keys) == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_another_process_with_another_hash_seed_writes_the_same_bytes(seed: str) -> None:
    script = (
        "import sys; from tests.emulator.test_graph import small_graph; g = small_graph();"
        "sys.stdout.write(g.key + ' ' + g.to_bytes().hex())"
    )
    environment = os.environ | {"PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{small_graph().key} {small_graph().to_bytes().hex()}"


def test_importing_the_graph_does_not_import_torch() -> None:
    script = (
        "import sys, nxpipe.emulator.errors, nxpipe.emulator.ir.graph, nxpipe.emulator.run.fast;"
        "import nxpipe.emulator.passes, nxpipe.emulator.capture;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(GraphInvalid):
        decode(data)


@given(place=st.integers(0, 10_000), byte=st.integers(0, 255))
@settings(max_examples=examples(300))
def test_a_changed_byte_is_refused_or_makes_another_graph(place: int, byte: int) -> None:
    data = bytearray(small_graph().to_bytes())
    data[place % len(data)] = byte
    try:
        read = decode(bytes(data))
    except GraphInvalid:
        return
    assert read.to_bytes() == bytes(data)


@given(cut=st.integers(0, 10_000), tail=st.binary(min_size=1, max_size=8))
def test_a_truncated_or_extended_file_is_refused(cut: int, tail: bytes) -> None:
    data = small_graph().to_bytes()
    for changed in (data[: cut % len(data)], data + tail):
        with pytest.raises(GraphInvalid):
            decode(changed)


# Values that a hostile header could hold anywhere.
hostile = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from(["", "float32", "bool", "unary", "reshape", "broadcast", "attention", "0x1p+0", "nan", "1e999"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _places(plain: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Every place inside a JSON document."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    return [path, *(place for key, part in items for place in _places(part, (*path, key)))]


def _header(graph: Graph) -> tuple[dict[str, object], bytes]:
    data = graph.to_bytes()
    (length,) = struct.unpack_from("<Q", data, 8)
    header: dict[str, object] = json.loads(data[16 : 16 + length])
    return header, data[16 + length :]


def _with_header(header: object, elements: bytes) -> bytes:
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return b"NXGRAPH2" + struct.pack("<Q", len(text)) + text + elements


@given(data=st.data(), replacement=hostile)
@settings(max_examples=examples(400), deadline=None)
def test_a_hostile_header_is_refused_without_a_crash(data: st.DataObject, replacement: object) -> None:
    header, elements = _header(small_graph())
    place = data.draw(st.sampled_from(_places(header)))
    if place:
        owner: object = header
        for key in place[:-1]:
            owner = owner[key]  # type: ignore[index]
        owner[place[-1]] = replacement  # type: ignore[index]
    hostile_bytes = _with_header(header if place else replacement, elements)
    try:
        read = decode(hostile_bytes)
    except GraphInvalid:
        return
    assert read.to_bytes() == hostile_bytes


def test_a_small_file_cannot_ask_for_a_large_allocation() -> None:
    header, elements = _header(small_graph())
    for shape in ([2**46], [2**40, 2**40], [0, 2**60], [2**30] * 3):
        header["constants"] = [["float32", shape]]
        with pytest.raises(GraphInvalid):
            decode(_with_header(header, elements))


def test_deeply_nested_json_is_refused() -> None:
    text = b"[" * 200_000
    with pytest.raises(GraphInvalid, match="not JSON"):
        decode(b"NXGRAPH2" + struct.pack("<Q", len(text)) + text)


def test_a_boolean_is_not_an_integer_attribute() -> None:
    header, elements = _header(small_graph())
    text = json.dumps(header).replace('"axis": 1', '"axis": true')
    with pytest.raises(GraphInvalid, match="where a int is required"):
        decode(_with_header(json.loads(text), elements))


def test_the_builder_refuses_two_inputs_of_one_name() -> None:
    builder = GraphBuilder()
    builder.input("x", TensorType((), F32))
    with pytest.raises(GraphInvalid, match="two inputs named 'x'"):
        builder.input("x", TensorType((), F32))


def test_a_parameter_has_one_type() -> None:
    builder = GraphBuilder()
    assert builder.parameter("w", TensorType((1,), F32)) == builder.parameter("w", TensorType((1,), F32))
    with pytest.raises(GraphInvalid, match="used both as"):
        builder.parameter("w", TensorType((2,), F32))


def test_a_shape_rule_explains_what_it_refuses() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2, 3), F32))
    with pytest.raises(IllTyped, match=r"the 6 elements of f32\[2,3\] do not fill the shape \[4, 2\]"):
        builder.add(Reshape((4, 2)), x)


def test_values_of_one_graph_are_told_apart_by_number() -> None:
    type_ = TensorType((1,), F32)
    assert Value(0, type_) != Value(1, type_)
    assert Node(Value(1, type_), Unary("exp"), (Value(0, type_),)).origin == Origin()
