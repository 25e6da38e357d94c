"""Unsupported types of a target: 64-bit integers, and one of the E4M3 variants."""

import numpy as np
import pytest

from nxpipe.emulator.capture import example_inputs
from nxpipe.emulator.errors import OptionsInvalid
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import ArgReduce, Binary, Cast, Iota, Linear, Reduce
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.passes.precision import ConstantTooLarge, legalise
from nxpipe.emulator.run.fast import execute
from tests.emulator.models import captured, request, weights

F32, I64, I32 = DType.FLOAT32, DType.INT64, DType.INT32
INF2 = PassOptions(target="inf2")


def counting(number: int) -> Graph:
    """Integers of all kinds: an input, a counter, a constant, a sum, a position."""
    builder = GraphBuilder()
    ids = builder.input("ids", TensorType((4,), I64))
    steps = builder.add(Binary("multiply"), builder.add(Iota(4, 0, 1, I64)), builder.scalar(number))
    total = builder.add(Reduce("sum", (0,), keep=True), builder.add(Binary("add"), ids, steps))
    builder.output("y", builder.add(Binary("add"), total, builder.add(ArgReduce("argmax", 0, keep=True), ids)))
    return builder.build()


def test_a_target_computes_integers_in_32_bits_between_an_interface_of_64() -> None:
    before, after = counting(3), legalise(counting(3), INF2)
    assert after.inputs["ids"].type.dtype is I64
    assert after.outputs["y"].type.dtype is I64
    between = [node for node in after.nodes if isinstance(node.op, Binary)]
    assert {value.type.dtype for node in between for value in (*node.operands, node.result)} == {I32}
    ids = {"ids": np.array([7, -5, 11, 2])}
    assert np.array_equal(execute(after, {}, ids)["y"], execute(before, {}, ids)["y"])


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**62])
def test_a_constant_that_does_not_fit_is_refused_with_its_number(number: int) -> None:
    with pytest.raises(ConstantTooLarge, match=str(number)):
        legalise(counting(number), INF2)
    assert legalise(counting(number), PassOptions()).nodes


@pytest.mark.parametrize("number", [2**31 - 1, -(2**31)])
def test_the_largest_constants_that_fit_are_kept(number: int) -> None:
    assert number in [int(table) for table in legalise(counting(number), INF2).constants.values()]


def test_unsigned_integers_are_computed_in_32_bits_too() -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((2,), DType.UINT64))
    builder.output("y", builder.add(Binary("add"), x, builder.constant(np.array(2**32 - 9, np.uint64), DType.UINT64)))
    graph = legalise(builder.build(), INF2)
    (added,) = (node for node in graph.nodes if isinstance(node.op, Binary))
    assert added.result.type.dtype is DType.UINT32
    assert list(execute(graph, {}, {"x": np.array([0, 8], np.uint64)})["y"]) == [2**32 - 9, 2**32 - 1]
    builder.output("z", builder.add(Binary("add"), x, builder.constant(np.array(2**32, np.uint64), DType.UINT64)))
    with pytest.raises(ConstantTooLarge, match=r"4294967296.*\(0 to 4294967295\)"):
        legalise(builder.build(), INF2)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_legal_model_answers_to_the_bit_as_before(family: str) -> None:
    wanted = request(family)
    before, after = (unroll(run_passes(captured(wanted), options)) for options in (PassOptions(), INF2))
    wide = [node for node in after.nodes if node.result.type.dtype is I64]
    assert all(isinstance(node.op, ArgReduce | Reduce) or node.op.name == "cumulate" for node in wide)
    parameters, inputs = weights(wanted), example_inputs(before, wanted.config, seed=0)
    answers = execute(after, parameters, inputs)
    for name, array in execute(before, parameters, inputs).items():
        np.testing.assert_array_equal(answers[name], array)


@pytest.mark.parametrize(
    ("target", "narrow"), [(None, "float8_e4m3"), ("trn2", "float8_e4m3"), ("trn3", "float8_e4m3fn")]
)
def test_fp8_autocast_takes_the_type_that_the_target_has(target: str | None, narrow: str) -> None:
    builder = GraphBuilder()
    x = builder.input("x", TensorType((1, 2), F32))
    builder.output("y", builder.add(Linear(F32), x, builder.parameter("w", TensorType((1, 2), F32))))
    graph = run_passes(builder.build(), PassOptions("matmult", "fp8_e4m3", target))
    casts = {node.op.dtype for node in graph.nodes if isinstance(node.op, Cast)}
    assert casts == {DType(narrow)}
    found = execute(graph, {"w": np.ones((1, 2), np.float32)}, {"x": np.array([[300.0, 1.0625]], np.float32)})
    # 240 is the end of the one type, 448 of the other; 1.0625 lies half-way between two numbers of both.
    assert np.isnan(found["y"].item()) if narrow == "float8_e4m3" else found["y"].item() == 288 + 1


def test_fp8_autocast_is_refused_for_a_target_that_is_not_known_to_have_it() -> None:
    with pytest.raises(OptionsInvalid, match=r"target 'cpu' has no fp8_e4m3; use bf16, or .* inf2, "):
        PassOptions("matmult", "fp8_e4m3", "cpu")
    assert PassOptions("none", "fp8_e4m3", "cpu").autocast == "none"
