"""A small graph of two ranks, and the digest of its module; importing this imports neither PyTorch nor jaxlib."""

import hashlib

from nxpipe.emulator.hlo.module import module_of
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import AllGather, Linear, RankSlice, SliceUpdate, Unary

F32 = DType.FLOAT32


def attention_block() -> Graph:
    """Slices, a cache, products, a collective: of two ranks."""
    builder = GraphBuilder()
    x = builder.input("x", TensorType((4, 8), F32))
    cache = builder.input("cache", TensorType((6, 8), F32))
    weight = builder.parameter("w", TensorType((8, 8), F32))
    share = builder.add(RankSlice(0, 1, (8,), (2,), 2), weight)
    rows = builder.add(Linear(F32), x, share)
    whole = builder.add(AllGather(1, 1, (8,), (2,), 2), rows)
    builder.output("y", builder.add(Unary("gelu"), whole))
    builder.output("cache", builder.add(SliceUpdate((1, 0), (5, 8), (1, 1)), cache, whole))
    return builder.build()


def digest(graph: Graph) -> str:
    return hashlib.sha256(module_of(graph, 2).text.encode()).hexdigest()
