"""Random well-typed graphs, for properties of every graph."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from nxpipe.emulator.errors import IllTyped
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    Attention,
    Binary,
    Broadcast,
    Cast,
    Concat,
    Gather,
    Index,
    Iota,
    LayerNorm,
    Linear,
    MatMul,
    Operator,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    Transpose,
    Unary,
    Where,
)

F32, BF16, I64 = DType.FLOAT32, DType.BFLOAT16, DType.INT64


@st.composite
def graphs(draw: Any) -> Graph:
    """Two inputs, two parameters, up to twenty nodes of mixed kinds, up to three outputs."""
    builder = GraphBuilder()
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    values = [
        builder.input("x", TensorType((rows, columns), F32)),
        builder.input("ids", TensorType((rows,), I64)),
        builder.parameter("w", TensorType((columns, columns), F32)),
        builder.parameter("table", TensorType((8, columns), F32)),
        builder.constant(np.linspace(-1, 1, columns), F32),
        builder.constant(np.arange(rows), I64),
        *(builder.scalar(number) for number in (0, 1, 2.0, 1.0, True)),
    ]
    for _ in range(draw(st.integers(1, 20))):
        operands = [draw(st.sampled_from(values)) for _ in range(draw(st.integers(0, 3)))]
        op = draw(_operators(operands))
        try:
            values.append(builder.add(op, *operands))
        except IllTyped:
            continue  # skip operators that do not fit the value
    for number in range(draw(st.integers(1, 3))):
        builder.output(f"out{number}", draw(st.sampled_from(values[-6:])))
    return builder.build()


def _operators(operands: list[Value]) -> st.SearchStrategy[Operator]:
    """Operators with attributes that may fit."""
    shape = operands[0].type.shape if operands else ()
    rank = len(shape)
    axis = st.integers(0, max(rank - 1, 0))
    return st.one_of(
        st.sampled_from(["tanh", "gelu", "negate", "abs", "exp", "logical_not"]).map(Unary),
        st.sampled_from(["add", "multiply", "subtract", "maximum", "power", "less", "and"]).map(Binary),
        st.sampled_from([F32, BF16, I64]).map(Cast),
        st.just(Where()),
        st.sampled_from([(int(np.prod(shape)),), shape, shape[::-1], (1, *shape)]).map(Reshape),
        st.permutations(range(rank)).map(tuple).map(Transpose),
        st.sampled_from([shape, (2, *shape)]).map(Broadcast),
        st.builds(
            lambda a: Slice(
                (0,) * rank, tuple(n if i != a else (n + 1) // 2 for i, n in enumerate(shape)), (1,) * rank
            ),
            axis,
        ),
        axis.map(Concat),
        st.builds(lambda a, keep: Reduce("sum", (a,), keep), axis, st.booleans()),
        st.builds(lambda a: Softmax(a, log=False), axis),
        st.just(LayerNorm(1, 1e-5)),
        st.just(Linear(F32)),
        st.just(MatMul(F32)),
        st.just(Attention(scale=0.5, causal=False, probabilities=F32, out=F32)),
        st.just(Gather(0)),
        st.just(Index((0,))),
        st.integers(1, 5).map(lambda length: Iota(length, 0, 1, I64)),
    )


def arguments(graph: Graph, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and inputs for a random graph; ids are below every table's height."""
    generator = np.random.default_rng(seed)

    def make(type_: TensorType) -> Array:
        return (
            generator.standard_normal(type_.shape).astype(np.float32)
            if type_.dtype.is_float
            else np.zeros(type_.shape, np.int64)
        )

    parameters = {name: make(value.type) for name, value in graph.parameters.items()}
    return parameters, {name: make(value.type) for name, value in graph.inputs.items()}
