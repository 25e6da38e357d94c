"""Attention needs no mask to look back: one that says just that is gone, any other stays."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Attention, Binary
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.fuse import recognise_causal
from nxpipe.emulator.run.fast import execute

F32, I32 = DType.FLOAT32, DType.INT32
PLACES = st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(-2, 6), min_size=size, max_size=size))


def attending(rows: int, keys: int, mask: Value, builder: GraphBuilder) -> Graph:
    query = builder.input("query", TensorType((2, 3, rows, 4), F32))
    known = [builder.input(name, TensorType((2, 3, keys, 4), F32)) for name in ("key", "value")]
    op = Attention(scale=0.5, causal=False, probabilities=F32, out=F32)
    builder.output("answer", builder.add(op, query, *known, mask))
    return builder.build()


def answers(graph: Graph) -> tuple[bool, Array]:
    """Whether its attention is causal and has no mask, and what it says."""
    random = np.random.default_rng(0)
    inputs = {name: random.normal(size=value.type.shape).astype(np.float32) for name, value in graph.inputs.items()}
    (node,) = [node for node in graph.nodes if isinstance(node.op, Attention)]
    assert isinstance(node.op, Attention)
    assert node.op.causal == (len(node.operands) == 3)
    return node.op.causal, execute(graph, {}, inputs)["answer"]


def require_found_if_causal(graph: Graph, mask: Array) -> None:
    found, answer = answers(recognise_causal(graph, PassOptions()))
    assert found == np.array_equal(mask, np.tri(*mask.shape, dtype=np.bool_))
    np.testing.assert_array_equal(answer, answers(graph)[1])


@given(PLACES, PLACES, st.booleans())
@example([0, 2, 1], [0], False)
def test_places_that_are_compared_so_that_each_row_sees_up_to_itself_are_found(
    keys: list[int], rows: list[int], turned: bool
) -> None:
    _require_places(np.array(keys), np.array(rows), turned)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(4, 4), (3, 5), (5, 3), (1, 1)])
def test_rows_and_keys_that_are_counted_alike_are_found(rows: int, keys: int, turned: bool) -> None:
    _require_places(np.arange(keys), np.arange(rows), turned)
    _require_places(np.arange(keys), np.arange(rows) + 1, turned)


def _require_places(keys: Array, rows: Array, turned: bool) -> None:
    builder = GraphBuilder()
    key = builder.constant(keys.astype(np.int32).reshape(1, 1, 1, -1), I32)
    row = builder.constant(rows.astype(np.int32).reshape(1, 1, -1, 1), I32)
    mask = builder.add(Binary("greater_equal"), row, key) if turned else builder.add(Binary("less_equal"), key, row)
    require_found_if_causal(attending(len(rows), len(keys), mask, builder), keys[None, :] <= rows[:, None])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(-2, 2), st.booleans())
def test_a_table_is_found_if_it_says_so(rows: int, keys: int, shift: int, holed: bool) -> None:
    table = np.tri(rows, keys, shift, dtype=np.bool_)
    if holed:
        table[rows // 2, 0] ^= True
    builder = GraphBuilder()
    mask = builder.constant(table.reshape(1, 1, rows, keys), DType.BOOL)
    require_found_if_causal(attending(rows, keys, mask, builder), table)


def test_a_mask_of_each_sequence_stays() -> None:
    builder = GraphBuilder()
    own = np.stack([np.tri(4, dtype=np.bool_), np.ones((4, 4), np.bool_)]).reshape(2, 1, 4, 4)
    graph = attending(4, 4, builder.constant(own, DType.BOOL), builder)
    assert not answers(recognise_causal(graph, PassOptions()))[0]
