"""Small models in several buckets, as loadable programs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from nxpipe.emulator.compile import CompiledGraph, ports_of, shard_graph
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import AllReduce, Binary, Gather, Linear, RankSlice, Unary
from nxpipe.emulator.passes.options import PassOptions
from nxpipe.emulator.passes.shard import Sharding
from nxpipe.emulator.run.model import Fast
from tests.emulator.divided_models import request
from tests.emulator.models import captured, weights

F32, I64 = DType.FLOAT32, DType.INT64
SIZES = {
    "input_ids": ("", "sequence"),
    "attention_mask": ("", "sequence"),
}
NAMED: Mapping[str, tuple[str, ...]] = {"ids": ("batch", "sequence"), "y": ("batch", "sequence", "")}
TABLE = np.arange(24, dtype=np.float32).reshape(6, 4)


def lookup(batch: int, sequence: int) -> Fast:
    """Rows of a table by ids below 6, through tanh, for each token separately."""
    builder = GraphBuilder()
    ids = builder.input("ids", TensorType((batch, sequence), I64))
    table = builder.parameter("table", TensorType(TABLE.shape, F32))
    builder.output("y", builder.add(Unary("tanh"), builder.add(Gather(0), table, ids)))
    program = whole(builder.build())
    return Fast(program, ports_of(program, NAMED))


def running_sum(length: int, state: str = "total") -> Fast:
    """Add an input to a state, and return the sum."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((length,), F32))
    total = builder.input(state, TensorType((length,), F32))
    after = builder.add(Binary("add"), x, total)
    builder.output("y", after)
    builder.output(state, after)
    program = whole(builder.build())
    return Fast(program, ports_of(program))


def divided_product() -> Fast:
    """x @ w.T on two ranks, each with half of the input columns of `w`."""
    piece = Sharding(1, (8,), (2,))
    graphs = []
    for ranks in (1, 2):
        builder = GraphBuilder()
        x, w = builder.input("x", TensorType((3, 8), F32)), builder.parameter("w", TensorType((5, 8), F32))
        if ranks == 1:
            y = builder.add(Linear(F32), x, w)
        else:
            cut = RankSlice(piece.axis, 1, piece.sizes, piece.parts, ranks)
            y = builder.add(AllReduce(2), builder.add(Linear(F32), builder.add(cut, x), builder.add(cut, w)))
        builder.output("y", y)
        graphs.append(builder.build())
    program = CompiledGraph(graphs[0], graphs[1], 2, {"w": piece}, {})
    return Fast(program, ports_of(program))


def whole(graph: Graph) -> CompiledGraph:
    return CompiledGraph(graph, graph, 1, {}, {})


@cache
def llama(degree: int = 1) -> tuple[Sequence[Fast], Mapping[str, Array]]:
    """Two prefills, of 4 and of 10 tokens, and a decode for both."""
    long = request("llama", "prefill")
    wanted = [replace(long, sequence=4, capacity=10), long, request("llama", "decode")]
    programs = [shard_graph(captured(entry), PassOptions(tensor_parallel=degree)) for entry in wanted]
    # A decode reads exactly one token of each row.
    sizes: list[Mapping[str, tuple[str, ...]]] = [SIZES, SIZES, {}]
    return [Fast(program, ports_of(program, names)) for program, names in zip(programs, sizes, strict=True)], weights(
        long, seed=1
    )
