"""Every operator, against PyTorch: captured from PyTorch, typed by our shape rules, computed by our numerics."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

from emulator.capture.export import capture_module
from emulator.errors import IllTyped, IndexOutOfRange
from emulator.fast import execute
from emulator.graph import Graph
from emulator.numerics import Array
from emulator.ops import OPERATORS, Attention, Broadcast, Concat, Linear, MatMul, Operator, Reduce, Slice, result_type
from emulator.passes import check
from emulator.types import DType, TensorType

Function = Callable[..., Any]


class Applied(torch.nn.Module):
    """A function as a module, so that it can be captured."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any, y: Any = None, z: Any = None) -> Any:
        return self.function(*(operand for operand in (x, y, z) if operand is not None))


def normal(*shape: int) -> Array:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> Array:
    return np.abs(normal(*shape)) + 0.1


def counted(*shape: int, below: int = 5) -> Array:
    return np.random.default_rng(below).integers(0, below, shape)


def truth(*shape: int) -> Array:
    return normal(*shape) > 0


X = normal(2, 3, 4)
SAME = (X, normal(2, 3, 4) + 1)

UNARY: dict[str, Function] = {
    "abs": torch.abs,
    "ceil": torch.ceil,
    "cos": torch.cos,
    "elu": nnf.elu,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "gelu": nnf.gelu,
    "gelu tanh": lambda x: nnf.gelu(x, approximate="tanh"),
    "hardsigmoid": nnf.hardsigmoid,
    "hardswish": nnf.hardswish,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "leaky relu": nnf.leaky_relu,
    "log sigmoid": nnf.logsigmoid,
    "mish": nnf.mish,
    "neg": torch.neg,
    "reciprocal": torch.reciprocal,
    "relu": nnf.relu,
    "relu6": nnf.relu6,
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "silu": nnf.silu,
    "sin": torch.sin,
    "softplus": nnf.softplus,
    "softplus beta": lambda x: nnf.softplus(x, beta=3, threshold=2),
    "square": torch.square,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp min": lambda x: x.clamp_min(0.25),
    "clamp max": lambda x: x.clamp_max(0.25),
    "scalar arithmetic": lambda x: (3 - x) * 2 + 1 / (x * x + 1),
    "scalar power": lambda x: x**3,
    "to integer": lambda x: (x * 10).to(torch.int32),
    "to half and back": lambda x: x.to(torch.float16).to(torch.float32),
    "to bfloat16": lambda x: x.bfloat16() * 1.1,
    "dropout": lambda x: nnf.dropout(x, 0.5, training=False),
    "log softmax": lambda x: torch.log_softmax(x, 1),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of half": lambda x: torch.softmax(x.half(), -1, dtype=torch.float32),
    "layer norm": lambda x: nnf.layer_norm(x, (3, 4)),
    "rms norm": lambda x: nnf.rms_norm(x, (4,)),
    "sum": lambda x: x.sum(),
    "sum axes": lambda x: x.sum((0, 2), keepdim=True),
    "sum booleans": lambda x: (x > 0).sum(-1),
    "mean": lambda x: x.mean(),
    "mean axis": lambda x: x.mean(-1, keepdim=True),
    "mean of integers as float": lambda x: (x * 9).int().mean(1, dtype=torch.float32),
    "amax": lambda x: x.amax((0, 1)),
    "amin": lambda x: x.amin(2, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max with place": lambda x: tuple(x.max(1)),
    "min with place": lambda x: tuple(x.min(-1, keepdim=True)),
    "prod": lambda x: x.prod(1),
    "var": lambda x: x.var(-1),
    "var without correction": lambda x: x.var((1, 2), correction=0, keepdim=True),
    "any": lambda x: (x > 1).any(-1),
    "all": lambda x: (x < 1).all(),
    "argmax": lambda x: x.argmax(),
    "argmax axis": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(-1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "cumsum of booleans": lambda x: (x > 0).cumsum(-1),
    "cumprod": lambda x: x.cumprod(2),
    "sort": lambda x: tuple(x.sort(-1)),
    "sort descending": lambda x: x.sort(1, descending=True).values,
    "argsort of equals": lambda x: torch.argsort((x > 0).int(), stable=True),
    "topk": lambda x: x.topk(2, dim=1).values,
    "smallest": lambda x: x.topk(2, dim=-1, largest=False).indices,
    "view": lambda x: x.view(6, -1),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(-1).squeeze(3),
    "permute": lambda x: x.permute(2, 0, -2),
    "transpose": lambda x: x.transpose(0, -1),
    "matrix transpose": lambda x: x.mT,
    "t": lambda x: x[0].t(),
    "expand": lambda x: x[:, :1].expand(-1, 5, -1),
    "select": lambda x: x[:, -1],
    "slice": lambda x: x[1:, ::2, -3:],
    "narrow": lambda x: x.narrow(2, 1, 2),
    "cat": lambda x: torch.cat([x, x + 1], -1),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "split": lambda x: x.split(3, dim=-1),
    "split sizes": lambda x: x.split([1, 3], -1),
    "chunk": lambda x: x.chunk(2, dim=-1),
    "unbind": lambda x: x.unbind(1),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((1, -1), (1, 2)),
    "roll flat": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(2, 1, 1, 3),
    "repeat interleave": lambda x: x.repeat_interleave(2, dim=1),
    "pad": lambda x: nnf.pad(x, (1, 2, 0, 1), value=0.5),
    "crop by padding": lambda x: nnf.pad(x, (-1, 1)),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "arange": lambda x: torch.arange(4) + x,
    "arange start": lambda x: torch.arange(1, 5) * x,
    "arange step": lambda x: torch.arange(8, 0, -2) * x,
    "arange of floats": lambda x: torch.arange(0, 2, 0.5) * x,
    "zeros": lambda x: torch.zeros(3, 4) + x,
    "ones": lambda x: torch.ones_like(x) - x,
    "full": lambda x: torch.full((4,), 2.5) * x,
    "full like": lambda x: torch.full_like(x, -1) * x,
    "new full": lambda x: x.new_full((3, 1), 0.5) + x,
    "einsum": lambda x: torch.einsum("bij,bkj->ik", x, x),
    "in place": lambda x: _written_in_place(x.clone()),
    "a constant tensor": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "group norm": lambda x: nnf.group_norm(x.reshape(2, 4, 3), 2),
}


def _written_in_place(x: Any) -> Any:
    x[:, 1] = 7.0
    x[0].mul_(2)
    return x.add_(1)


BINARY: dict[str, Function] = {
    "add": lambda x, y: torch.add(x, y, alpha=2),
    "sub": lambda x, y: torch.sub(x, y, alpha=0.5),
    "mul": torch.mul,
    "div": torch.div,
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": lambda x, y: x.round() == y.round(),
    "ne": lambda x, y: x.round() != y.round(),
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical and": torch.logical_and,
    "logical or": lambda x, y: torch.logical_or(x > 0, y > 0),
    "logical xor": lambda x, y: torch.logical_xor(x > 0, y > 0),
    "logical not": lambda x, y: torch.logical_not(x > y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where scalar": lambda x, y: torch.where(x > y, x, 0.0),
    "masked fill": lambda x, y: x.masked_fill(y > 0, -1e9),
    "matmul": lambda x, y: x @ y.mT,
    "matmul broadcast": lambda x, y: x @ y[0].t(),
    "matrix times vector": lambda x, y: x @ y[0, 0],
    "vector times matrix": lambda x, y: x[0, 0] @ y.mT,
    "bmm": lambda x, y: torch.bmm(x, y.mT),
    "mm": lambda x, y: torch.mm(x[0], y[0].t()),
    "addmm": lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t()),
    "addmm scaled": lambda x, y: torch.addmm(x[0, 0, :3], x[0], y[0].t(), beta=0.5, alpha=2),
    "baddbmm": lambda x, y: torch.baddbmm(x[:, :, :3], x, y.mT),
    "linear": lambda x, y: nnf.linear(x, y[0]),
    "linear bias": lambda x, y: nnf.linear(x, y[0], y[0, :, 0]),
    "layer norm affine": lambda x, y: nnf.layer_norm(x, (4,), y[0, 0], y[0, 1]),
    "layer norm bias": lambda x, y: nnf.layer_norm(x, (4,), None, y[0, 1]),
    "group norm affine": lambda x, y: nnf.group_norm(x.mT, 2, y[0, 0], y[0, 1]),
    "rms norm affine": lambda x, y: nnf.rms_norm(x, (4,), y[0, 0], 1e-3),
    "slice scatter": lambda x, y: torch.slice_scatter(x, y[:, :, :2], 2, 0, 4, 2),
    "select scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, -1),
    "type as": lambda x, y: (x * 5).int().type_as(y),
}

# Function, operands.
SPECIAL: dict[str, tuple[Function, tuple[Array, ...]]] = {
    "log": (torch.log, (positive(3, 4),)),
    "log1p": (torch.log1p, (positive(3, 4),)),
    "log2": (torch.log2, (positive(3, 4),)),
    "rsqrt": (torch.rsqrt, (positive(3, 4),)),
    "sqrt": (torch.sqrt, (positive(3, 4),)),
    "pow": (torch.pow, (positive(3, 4), normal(3, 4))),
    "integer sum": (lambda x: x.sum(0), (counted(3, 4).astype(np.int32),)),
    "integer division": (lambda x: x / 2, (counted(3, 4),)),
    "integer floor division": (lambda x: (x - 2) // 2, (counted(3, 4),)),
    "integer truncating division": (lambda x: torch.div(x - 2, 2, rounding_mode="trunc"), (counted(3, 4),)),
    "bits": (lambda x, y: (x & y) | (x ^ ~y), (counted(3, 4), counted(3, 4, below=9))),
    "boolean algebra": (lambda x, y: (x & y) | ~x ^ y, (truth(3, 4), truth(4))),
    "embedding": (nnf.embedding, (counted(2, 3), normal(5, 4))),
    "index select": (lambda x, y: y.index_select(1, x), (counted(3), normal(2, 5))),
    "gather": (lambda x, y: y.gather(1, x), (counted(2, 3), normal(4, 5))),
    "take along": (lambda x, y: torch.take_along_dim(y, x, 1), (counted(4, 3), normal(4, 5))),
    "index": (lambda x, y: y[x], (counted(2, 3), normal(5, 4))),
    "index two axes": (lambda x, y: y[x[:, None], x], (counted(3, below=2), normal(2, 3, 4))),
    "index apart": (lambda x, y: y[x, :, x], (counted(3, below=2), normal(2, 3, 4))),
    "index negative": (lambda x, y: y[:, x - 2], (counted(3, below=3), normal(2, 3, 4))),
    "index put": (lambda x, y: y.index_put((x,), y[:2] * 0), (np.array([2, 0]), normal(4, 3))),
    "index put adds": (lambda x, y: y.index_put((x,), y[:2], accumulate=True), (np.array([2, 2]), normal(4, 3))),
    "index copy": (lambda x, y: y.index_copy(1, x, y[:, :2] + 1), (np.array([2, 0]), normal(4, 3))),
    "index add": (lambda x, y: y.index_add(0, x, y[:2], alpha=2), (np.array([2, 2]), normal(4, 3))),
    "attention": (nnf.scaled_dot_product_attention, (normal(2, 4, 5, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 6))),
    "attention causal": (
        lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (normal(2, 5, 8), normal(2, 5, 8) + 1, normal(2, 5, 8) - 1),
    ),
    "attention grouped": (
        lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (normal(2, 4, 5, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8)),
    ),
    "attention grouped, causal": (
        lambda q, k, v: nnf.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        (normal(2, 6, 5, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)),
    ),
    "attention with a boolean mask and an empty row": (
        lambda q, k, mask: nnf.scaled_dot_product_attention(q, k, k, attn_mask=mask),
        (normal(2, 2, 3, 8), normal(2, 2, 3, 8), np.tri(3, 3, -1) > 0),
    ),
    "attention with an additive mask": (
        lambda q, k, mask: nnf.scaled_dot_product_attention(q, k, k, attn_mask=mask),
        (normal(2, 2, 3, 8), normal(2, 2, 3, 8), normal(2, 1, 3, 3)),
    ),
    "bfloat16 matmul": (lambda x, y: x.bfloat16() @ y.bfloat16(), (normal(4, 8), normal(8, 3))),
    "a scalar does not widen": (lambda x: x.bfloat16() + 1e-3, (normal(4, 8),)),
}

CASES: dict[str, tuple[Function, tuple[Array, ...]]] = (
    {name: (function, (X,)) for name, function in UNARY.items()}
    | {name: (function, SAME) for name, function in BINARY.items()}
    | SPECIAL
)


def captured(function: Function, operands: tuple[Array, ...]) -> tuple[Graph, dict[str, Array]]:
    inputs = dict(zip("xyz", operands, strict=False))
    graph = capture_module(Applied(function), {name: torch.from_numpy(array) for name, array in inputs.items()})
    return graph, inputs


@pytest.mark.parametrize("name", CASES)
def test_an_operator_agrees_with_pytorch(name: str) -> None:
    function, operands = CASES[name]
    graph, inputs = captured(function, operands)
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


def test_every_operator_and_every_member_of_its_family_is_among_the_cases() -> None:
    from emulator.ops import elementwise, reduce

    nodes = [node for case in CASES.values() for node in captured(*case)[0].nodes]
    assert {node.op.name for node in nodes} == set(OPERATORS)
    functions = {*elementwise._SMOOTH, *elementwise._KEEPING, *elementwise._PREDICATES, "divide"}
    functions |= {*elementwise._ARITHMETIC, *elementwise._COMPARISONS, *elementwise._BITWISE}
    assert functions | set(reduce._REDUCTIONS) <= {node.op.label for node in nodes}


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


@pytest.mark.parametrize(
    ("op", "operands", "complaint"),
    [
        (Linear(F32), ["f32[2,3]", "f32[4,5]"], "rows of another length"),
        (Linear(F32), ["f32[2,3]", "bf16[4,3]"], "not of one float type"),
        (Linear(F32), ["f32[2,3]", "f32[4,3]", "f32[3]"], "for 4 outputs"),
        (Linear(F32), ["f32[2,3]"], "takes 2 to 3 operands, but was given 1"),
        (Linear(DType.INT64), ["f32[2,3]", "f32[4,3]"], "cannot leave as int64"),
        (MatMul(F32), ["f32[2,3]", "f32[2,3]"], "do not agree on the inner size"),
        (MatMul(F32), ["i64[2,3]", "i64[3,2]"], "not of one float type"),
        (Concat(1), ["f32[2,3]", "f32[3,3]"], "does not continue"),
        (Concat(0), [], "takes 1 or more operands, but was given 0"),
        (Broadcast((2, 4)), ["f32[2,3]"], "do not broadcast together"),
        (Slice((0,), (9,), (1,)), ["f32[3]"], "is not inside"),
        (Reduce("sum", (2,), keep=False), ["f32[3]"], "do not exist"),
        (Reduce("median", (0,), keep=False), ["f32[3]"], "no reduction of this name"),
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
