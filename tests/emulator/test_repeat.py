"""Repeats: found, exact, and equivalent for execution, storage and printing."""

import json
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxpipe.emulator.errors import ExecutionError, GraphInvalid
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.decoding import decode
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.repeat import NotResizable, resize, unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Binary, Linear, Unary
from nxpipe.emulator.passes import PassOptions, check
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.run.fast import execute
from tests.emulator.random_graphs import arguments, graphs
from tests.tiers import examples

F32 = DType.FLOAT32
PLAIN = PassOptions()
SQUARE, VECTOR = TensorType((4, 4), F32), TensorType((2, 4), F32)


def layered(layers: int, *, odd: int = -1, swap: bool = False, states: bool = True) -> Graph:
    """Layers of a matrix and a state each, around a value read by all; one layer may differ."""
    builder = GraphBuilder()
    x = builder.input("x", VECTOR)
    old = {i: builder.input(f"cache.{i}.key", VECTOR) for i in range(layers) if states}
    shared = builder.add(Unary("tanh"), x)
    for i in range(layers):
        y = builder.add(Linear(F32), x, builder.parameter(f"layers.{i}.weight", SQUARE))
        y = builder.add(Unary("exp" if i == odd else "tanh"), y)
        if states:
            y = builder.add(Binary("add"), y, old[i])
            builder.output(f"cache.{i}.key", y)
        other = shared if not swap or i % 2 else y
        x = builder.add(Binary("multiply"), builder.add(Binary("add"), x, y), other)
    builder.output("y", builder.add(Linear(F32), x, builder.parameter("head", SQUARE)))
    return builder.build()


def rolled(layers: int, **how: Any) -> Graph:
    graph = roll(layered(layers, **how), PLAIN)
    check(graph, after="rolling")
    return graph


def test_equal_layers_are_stored_once() -> None:
    graph = rolled(6)
    (repeat,) = graph.repeats
    assert repeat.count == 6
    assert len(graph.nodes) == 1 + 5 + 1
    assert graph.key == layered(6).key == unroll(graph).key
    assert list(graph.parameters) == [*(f"layers.{i}.weight" for i in range(6)), "head"]


def test_a_repeat_reads_pleasantly() -> None:
    assert str(rolled(6)) == (
        "graph(x: f32[2,4], cache.{0..5}.key: f32[2,4])\n"
        "  %0: f32[2,4] = tanh(x)\n"
        "  repeat 6 times, x becomes %5:\n"
        "    %1: f32[2,4] = linear(x, w:layers.{0..5}.weight)\n"
        "    %2: f32[2,4] = tanh(%1)\n"
        "    %3: f32[2,4] = add(%2, cache.{0..5}.key)\n"
        "    %4: f32[2,4] = add(x, %3)\n"
        "    %5: f32[2,4] = multiply(%4, %0)\n"
        "  %6: f32[2,4] = linear(%5, w:head)\n"
        "return cache.{0..5}.key=%3, y=%6"
    )


def test_layers_that_alternate_repeat_two_by_two() -> None:
    (repeat,) = rolled(8, swap=True).repeats
    assert repeat.count * (repeat.stop - repeat.start) == 5 * 8
    assert repeat.count == 4


def test_what_stands_on_either_side_of_an_odd_layer_repeats_by_itself() -> None:
    graph = rolled(9, odd=4)
    assert [repeat.count for repeat in graph.repeats] == [4, 4]
    assert graph.key == layered(9, odd=4).key


def test_layers_of_unlike_width_do_not_repeat() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((1, 2), F32))
    for i in range(5):
        x = builder.add(Linear(F32), x, builder.parameter(f"layers.{i}", TensorType((i + 3, i + 2), F32)))
    builder.output("y", x)
    graph = builder.build()
    assert roll(graph, PLAIN) is graph


def test_a_layer_that_reads_two_layers_back_is_not_misread() -> None:
    builder = GraphBuilder()
    before, x = (builder.input(name, VECTOR) for name in "ab")
    for i in range(6):
        y = builder.add(Linear(F32), x, builder.parameter(f"layers.{i}", SQUARE))
        before, x = x, builder.add(Binary("add"), y, before)
    builder.output("y", x)
    graph = builder.build()
    again = roll(graph, PLAIN)
    check(again, after="rolling")
    assert again.key == graph.key


@given(graph=graphs(), times=st.integers(2, 4), seed=st.integers(0, 9))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_rolling_keeps_key_bytes_and_results_of_random_programs(graph: Graph, times: int, seed: int) -> None:
    chained = chain(graph, times)
    again = roll(chained, PLAIN)
    check(again, after="rolling")
    assert len(again.nodes) <= len(chained.nodes)
    assert unroll(again).key == chained.key
    assert decode(again.to_bytes()).to_bytes() == again.to_bytes()
    assert roll(again, PLAIN).to_bytes() == again.to_bytes()
    parameters, inputs = arguments(chained, seed)
    try:
        expected = execute(chained, parameters, inputs)
    except ExecutionError:
        return  # a random index may leave its table; then there is no result to keep
    found = execute(again, parameters, inputs)
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name])


def chain(graph: Graph, times: int) -> Graph:
    """A graph several times in sequence: its input `x` is the former output, if the type permits."""
    builder = GraphBuilder()
    new: dict[Value, Value] = {value: builder.input(name, value.type) for name, value in graph.inputs.items()}
    new |= {value: builder.constant(data, value.type.dtype) for value, data in graph.constants.items()}
    for time in range(times):
        new |= {v: builder.parameter(f"layers.{time}.{name}", v.type) for name, v in graph.parameters.items()}
        for node in graph.nodes:
            new[node.result] = builder.add(node.op, *(new[operand] for operand in node.operands))
        for name, value in graph.outputs.items():
            builder.output(f"{name}.{time}", new[value])
        for value in graph.outputs.values():
            if value.type == graph.inputs["x"].type:
                new[graph.inputs["x"]] = new[value]
    return builder.build()


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
def test_another_count_makes_the_graph_of_another_depth(layers: int) -> None:
    resized = resize(rolled(4), {"layers.": layers - 4})
    check(resized, after="resizing")
    assert resized.key == layered(layers).key
    assert resized.parameters.keys() == layered(layers).parameters.keys()


def test_a_repeat_of_nothing_that_counts_cannot_grow() -> None:
    with pytest.raises(NotResizable, match="0 repeats take weights of"):
        resize(rolled(4), {"blocks.": 1})
    with pytest.raises(NotResizable, match="no whole number"):
        resize(rolled(8, swap=True), {"layers.": 1})


def spoiled(**changes: Any) -> Graph:
    graph = rolled(4)
    return replace(graph, repeats=(replace(graph.repeats[0], **changes),))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"count": 1}, "has fewer than 2 iterations"),
        ({"stop": 99}, "overlaps the repeat before it"),
        ({"start": 5, "stop": 5}, "overlaps the repeat before it"),
        ({"count": 5}, "takes 4 tensors for one value"),
        ({"count": 2**62, "taken": {}, "given": {}}, "expand to more than"),
    ],
)
def test_an_unsound_repeat_is_caught(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(GraphInvalid, match=reason):
        check(spoiled(**changes), after="spoiling")


def test_a_repeat_carries_only_what_it_computes() -> None:
    graph = rolled(4)
    x, weight = graph.inputs["x"], graph.parameters["layers.0.weight"]
    for carried in ({x: x}, {x: weight}, {Value(999, VECTOR): graph.nodes[2].result}):
        with pytest.raises(GraphInvalid, match="carries"):
            check(spoiled(carried=carried), after="spoiling")


@given(data=st.data(), number=st.integers(-3, 40) | st.sampled_from([2**40, 2**70]))
@settings(max_examples=examples(300), deadline=None)
def test_hostile_tables_of_a_repeat_are_refused_without_a_crash(data: st.DataObject, number: int) -> None:
    encoded = rolled(4).to_bytes()
    (length,) = struct.unpack_from("<Q", encoded, 8)
    header = json.loads(encoded[16 : 16 + length])
    row = header["repeats"][0]
    place = data.draw(st.integers(0, len(row) - 1))
    while isinstance(row[place], list) and row[place]:
        row, place = row[place], data.draw(st.integers(0, len(row[place]) - 1))
    changed = row[place] != number
    row[place] = number
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    hostile = encoded[:8] + struct.pack("<Q", len(text)) + text + encoded[16 + length :]
    try:
        read = decode(hostile)
    except GraphInvalid:
        assert changed
        return
    assert read.to_bytes() == hostile
    check(read, after="reading")
