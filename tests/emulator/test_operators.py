"""Every operator compared with PyTorch: captured, typed by our shape rules, computed by our numerics."""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

from nxpipe.emulator.capture.export import capture_module
from nxpipe.emulator.errors import IllTyped, IndexOutOfRange
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    OPERATORS,
    Attention,
    Binary,
    Broadcast,
    Concat,
    Linear,
    MatMul,
    Operator,
    Reduce,
    Slice,
    result_type,
)
from nxpipe.emulator.passes import check
from nxpipe.emulator.run.fast import execute
from tests.emulator.operator_cases import CASES, UNARY, Function, counted, normal


class Applied(torch.nn.Module):
    """A function as a module, so that it can be captured."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, y: Any = None, z: Any = None) -> Any:
        return self.function(*(operand for operand in (x, y, z) if operand is not None))


def captured(function: Function, operands: tuple[Array, ...]) -> tuple[Graph, dict[str, Array]]:
    inputs = dict(zip("xyz", operands, strict=False))
    graph = capture_module(Applied(function), {name: torch.from_numpy(array) for name, array in inputs.items()})
    return graph, inputs


@cache
def case(name: str) -> tuple[Graph, dict[str, Array]]:
    return captured(*CASES[name])


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_an_operator_agrees_with_pytorch(name: str) -> None:
    function, operands = CASES[name]
    graph, inputs = case(name)
    check(graph, after="capture")
    found = list(execute(graph, {}, inputs).values())
    expected = function(*map(torch.from_numpy, operands))
    expected = list(expected) if isinstance(expected, tuple | list) else [expected]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        coarse = theirs.dtype in (torch.bfloat16, torch.float16)
        reference = theirs.float().numpy() if theirs.is_floating_point() else theirs.numpy()
        assert ours.dtype == reference.dtype
        np.testing.assert_allclose(ours, reference, rtol=1e-2 if coarse else 2e-5, atol=1e-2 if coarse else 1e-6)


@pytest.mark.sample(12)
def test_every_operator_and_every_member_of_its_family_is_among_the_cases() -> None:
    from nxpipe.emulator.ops import elementwise, linalg

    nodes = [node for name in CASES for node in case(name)[0].nodes]
    alone = {name for name, kind in OPERATORS.items() if kind.__module__ != "nxpipe.emulator.ops.collective"}
    assert {node.op.name for node in nodes} == alone
    functions = {*elementwise._SMOOTH, *elementwise._KEEPING, *elementwise._PREDICATES, "divide"}
    functions |= {*elementwise._ARITHMETIC, *elementwise._COMPARISONS, *elementwise._BITWISE}
    assert functions | set(linalg._REDUCTIONS) <= {node.op.label for node in nodes}


def test_special_values_pass_through_the_functions_as_in_pytorch() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e30, -1e30, 1e-40], np.float32)
    for name in ("abs", "exp", "isinf", "isnan", "relu", "sigmoid", "sign", "silu", "softplus", "tanh"):
        graph, inputs = captured(UNARY[name], (values,))
        expected = UNARY[name](torch.from_numpy(values)).numpy()
        np.testing.assert_allclose(execute(graph, {}, inputs)["output"], expected, rtol=1e-5, err_msg=name)


def test_gelu_of_a_large_negative_number_is_zero() -> None:
    graph, inputs = captured(nnf.gelu, (np.array([-5.5, -100, -1e30, 1e30], np.float32),))
    np.testing.assert_allclose(execute(graph, {}, inputs)["output"], [0, 0, 0, 1e30], atol=2e-7)


F32 = DType.FLOAT32


WHOLE = ("int8", "int16", "int32", "int64", "uint8", "bool")


@pytest.mark.parametrize(("one", "other"), [pair for pair in product(WHOLE, WHOLE) if pair != ("bool", "bool")])
def test_division_towards_zero_is_pytorch_s_at_the_edges_of_every_type(one: str, other: str) -> None:
    def edges(name: str) -> torch.Tensor:
        if name == "bool":
            return torch.tensor([False, True])
        limits = np.iinfo(name)
        return torch.tensor(
            [limits.min, limits.min + 1, -1 if limits.min else 3, 0, 1, 2, 7, limits.max - 1, limits.max]
        ).to(getattr(torch, name))

    rows, columns = edges(one), edges(other)
    a, b = rows.repeat_interleave(len(columns)), columns.repeat(len(rows))
    wide = torch.promote_types(a.dtype, b.dtype)
    defined = (b != 0) & ((a.to(wide) != torch.iinfo(wide).min) | (b.to(wide) != -1))  # else the processor traps
    a, b = a[defined], b[defined]
    expected = torch.div(a, b, rounding_mode="trunc").numpy()
    found = Binary("truncating_divide").compute(a.numpy(), b.numpy())
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


OF_INTEGERS: dict[str, Function] = {
    "add": torch.add,
    "and": torch.bitwise_and,
    "floor_divide": torch.floor_divide,
    "less": torch.lt,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "multiply": torch.multiply,
    "not_equal": torch.ne,
    "power": torch.pow,
    "remainder": torch.remainder,
    "subtract": torch.subtract,
}


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "uint8"])
@pytest.mark.parametrize("scalar", [-19, 300, 2**31 + 3])
def test_a_scalar_that_an_integer_type_does_not_hold_wraps_as_in_pytorch(name: str, scalar: int) -> None:
    limits = np.iinfo(name)
    x, y = np.array([limits.min, 0, 5, 12, 100, limits.max], name), np.asarray(scalar, np.int64)
    for function, theirs in OF_INTEGERS.items():
        expected = theirs(torch.from_numpy(x), torch.from_numpy(y)).numpy()
        found = Binary(function).compute(x, y)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=function)


@pytest.mark.parametrize("name", ["int8", "int32", "int64"])
def test_whole_numbers_raised_to_less_than_zero_are_pytorch_s(name: str) -> None:
    bases = np.array([[-3], [-1], [0], [1], [2]], name)
    exponents = np.array([-(2**7), -3, -2, -1, 0, 1, 2, 5], name)
    expected = torch.pow(torch.from_numpy(bases), torch.from_numpy(exponents)).numpy()
    np.testing.assert_array_equal(Binary("power").compute(bases, exponents), expected)


@pytest.mark.parametrize(
    ("op", "operands", "complaint"),
    [
        (Linear(F32), ["f32[2,3]", "f32[4,5]"], "differ in length"),
        (Linear(F32), ["f32[2,3]", "bf16[4,3]"], "not of one float type"),
        (Linear(F32), ["f32[2,3]", "f32[4,3]", "f32[3]"], "for 4 outputs"),
        (Linear(F32), ["f32[2,3]"], "takes 2 to 3 operands, but was given 1"),
        (Linear(DType.INT64), ["f32[2,3]", "f32[4,3]"], "result type int64 is not"),
        (MatMul(F32), ["f32[2,3]", "f32[2,3]"], "do not agree on the inner size"),
        (MatMul(F32), ["i64[2,3]", "i64[3,2]"], "not of one float type"),
        (Concat(1), ["f32[2,3]", "f32[3,3]"], "does not continue"),
        (Concat(0), [], "takes 1 or more operands, but was given 0"),
        (Broadcast((2, 4)), ["f32[2,3]"], "do not broadcast together"),
        (Slice((0,), (9,), (1,)), ["f32[3]"], "is not inside"),
        (Reduce("sum", (2,), keep=False), ["f32[3]"], "do not exist"),
        (Reduce("median", (0,), keep=False), ["f32[3]"], "unknown reduction"),
        (Attention(1.0, False, F32, F32), ["f32[2,3]", "f32[4,5]", "f32[4,5]"], "do not agree"),
        (Attention(1.0, False, F32, F32), ["f32[2,3]", "f32[4,3]", "f32[4,5]", "bool[9]"], "do not broadcast"),
    ],
)
def test_a_shape_rule_refuses(op: Operator, operands: list[str], complaint: str) -> None:
    with pytest.raises(IllTyped, match=complaint):
        result_type(op, tuple(map(_parsed, operands)))


def _parsed(text: str) -> TensorType:
    short, _, sizes = text.rstrip("]").partition("[")
    return TensorType(tuple(map(int, sizes.split(","))), next(dtype for dtype in DType if dtype.short == short))


def test_an_index_outside_of_its_table_is_an_error_that_says_where() -> None:
    graph, _ = captured(nnf.embedding, (counted(2, 3), normal(5, 4)))
    with pytest.raises(
        IndexOutOfRange, match=r"index 5 is outside of an axis of size 5 at gather of .*test_operators\.py"
    ):
        execute(graph, {}, {"x": np.array([[0, 1, 2], [3, 4, 5]]), "y": normal(5, 4)})
