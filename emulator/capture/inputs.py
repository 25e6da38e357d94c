"""Sample inputs of a graph: random token ids of the vocabulary, equal for equal seeds on every machine."""

from collections.abc import Mapping

import numpy as np

from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.numerics import Array, round_to
from nxpipe.emulator.run.inputs import lookups


def example_inputs(graph: Graph, config: Mapping[str, object], seed: int) -> dict[str, Array]:
    """Attention masks of ones, integers that index their tables and avoid padding, and normal floats."""
    return {name: _example(name, value, graph, config, seed) for name, value in graph.inputs.items()}


def _example(name: str, value: Value, graph: Graph, config: Mapping[str, object], seed: int) -> Array:
    shape, dtype = value.type.shape, value.type.dtype
    if "mask" in name:
        return np.ones(shape, dtype.held)
    # Seeded by name, so that adding an input does not change the others.
    generator = np.random.Generator(np.random.PCG64([seed, *name.encode()]))
    if name == "position":  # each row's next place in a cache that is half full or more
        capacity = graph.inputs["cache.0.key"].type.shape[2]
        return generator.integers(capacity // 2, capacity, shape, dtype.held)
    if dtype.is_float:
        return round_to(generator.standard_normal(shape, np.float32), dtype)
    allowed = np.arange(_rows_of_table(value, graph, config))
    padding = config.get("pad_token_id")
    if isinstance(padding, int) and len(allowed) > 1:
        allowed = allowed[allowed != padding]
    return generator.choice(allowed, shape).astype(dtype.held)


def _rows_of_table(value: Value, graph: Graph, config: Mapping[str, object]) -> int:
    """How many rows the smallest table has that this input indexes; two, when it indexes none."""
    rows = {size for _, size in lookups(value, graph)}
    vocabulary = config.get("vocab_size")
    if rows and isinstance(vocabulary, int):
        rows.add(vocabulary)
    return min(rows, default=2)
