"""Small graphs with every kind of instruction and loop, each with several random inputs.

Inputs are asymmetric. After the first sample they are so large that a softmax without its row's own maximum overflows
or almost vanishes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Program, Role
from nxpipe.emulator.lower import lower
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import (
    AllReduce,
    Attention,
    Binary,
    Gather,
    LayerNorm,
    Linear,
    RankSlice,
    Reduce,
    Softmax,
    Unary,
)
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.run.fast import LoadedRanks

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
DRAWS = {1: 2.0, 2: 200.0, 3: 200.0, 4: 200.0}  # seeds, and the range of inputs
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Sample:
    """`noise` is what sums of float32 in another order may differ by, in the first draw. `outside` are indices that the
    graph refuses."""

    name: str
    graph: Graph
    core: str
    ranks: int = 1
    noise: float = 0.0
    divided: tuple[tuple[str, RankSlice], ...] = ()  # sharded parameters
    outside: tuple[int, ...] = ()

    def given(self, seed: int, outside: tuple[int, float] | None = None) -> tuple[Tensors, Tensors]:
        """Parameters and inputs, optionally with an index out of range, at a share of the way through the indices."""
        random = np.random.default_rng(seed)
        graph = self.graph
        parameters = {name: _numbers(random, value.type, 0.4) for name, value in graph.parameters.items()}
        inputs = {name: _numbers(random, value.type, DRAWS[seed]) for name, value in graph.inputs.items()}
        for numbers in inputs.values():
            if outside is not None:
                index, place = outside
                numbers.flat[int((numbers.size - 1) * place)] = index
        return parameters, inputs

    def expected(self, seed: int) -> Tensors:
        """The outputs of the graph, node by node."""
        parameters, inputs = self.given(seed)
        outputs, states = LoadedRanks(self.graph, parameters).run(inputs)
        return {**outputs, **states[0]}

    def found(self, program: Program, seed: int, order: str, outside: tuple[int, float] | None = None) -> list[Tensors]:
        """The outputs of a program on each rank."""
        machine = Machine(program, order=order)
        parameters, inputs = self.given(seed, outside)
        pieces = dict(self.divided)
        for rank in range(self.ranks):
            for name, array in parameters.items():
                machine.write(name, pieces[name].piece(array, rank) if name in pieces else array, rank)
            for name in _own(program, inputs):
                machine.write(name, np.full(1, rank, np.uint32), rank)
        for name, array in inputs.items():
            machine.write(name, array)
        machine.execute()
        return [{name: machine.read(name, rank) for name in self.graph.outputs} for rank in range(self.ranks)]


@cache
def samples() -> tuple[tuple[Sample, Program], ...]:
    """Each sample with its lowered program."""
    made = (
        Sample("linear", _linear(), "v2", noise=1e-4),
        Sample("norm", _norm(), "v3", noise=1e-4),
        Sample("softmax", _softmax(), "v2", noise=1e-6),
        Sample("attention", _attention(), "v2", noise=1e-5),
        Sample("layers", _layers(), "v3", noise=1e-4),
        Sample("gather", _gather(), "v2", outside=(-5, ROWS, 3 * ROWS)),
        Sample("reduce", _reduce(), "v2", noise=1e-5),
        Sample("ranks", _ranks(), "v2", ranks=2, noise=1e-4, divided=(("w", RankSlice(1, 1, (64,), (2,), 2)),)),
        Sample("meetings", _meetings(), "v4", ranks=2, noise=1e-4, divided=_HALVES),
    )
    return tuple((sample, lower(sample.graph, sample.core, sample.ranks)) for sample in made)


def _own(program: Program, inputs: Tensors) -> list[str]:
    """The rank's number, an input that no graph has."""
    names = (name for buffer in program.buffers if buffer.role is Role.INPUT for name in buffer.names)
    return [name for name in names if name not in inputs]


def _numbers(random: np.random.Generator, type_: TensorType, scale: float) -> Array:
    if type_.dtype.is_integer:
        return np.asarray(random.integers(0, ROWS, type_.shape)).astype(type_.dtype.held)
    return (random.standard_normal(type_.shape) * scale + 0.1).astype(np.float32)


# Weights sharded over two ranks along the columns.
_HALVES = tuple((f"layers.{layer}.w", RankSlice(1, 1, (40,), (2,), 2)) for layer in range(3))
ROWS = 61  # height of the table of a gather


def _graph(build: Callable[[GraphBuilder], Mapping[str, Value]]) -> Graph:
    builder = GraphBuilder()
    for name, value in build(builder).items():
        builder.output(name, value)
    return builder.build()


def _linear() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        x, w = b.input("x", TensorType((300, 300), BF16)), b.parameter("w", TensorType((700, 300), BF16))
        return {"y": b.add(Unary("gelu"), b.add(Linear(F32), x, w, b.parameter("b", TensorType((700,), F32))))}

    return _graph(build)


def _norm() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        x = b.input("x", TensorType((520, 64), F32))
        y = b.add(Linear(F32), x, b.parameter("up", TensorType((96, 64), F32)))
        weight, bias = (b.parameter(name, TensorType((96,), F32)) for name in ("weight", "bias"))
        y = b.add(LayerNorm(1, 0.3), y, weight, bias)
        return {"y": b.add(Linear(F32), y, b.parameter("down", TensorType((64, 96), F32)))}

    return _graph(build)


def _softmax() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        x = b.input("x", TensorType((500, 48), F32))
        far = b.add(Binary("multiply"), x, b.scalar(3.0))
        return {"y": b.add(Softmax(1, False), far)}

    return _graph(build)


def _attention() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        q, k, v = (b.input(name, TensorType((1, 2, 24, 16), F32)) for name in "qkv")
        return {"y": b.add(Attention(0.7, True, F32, F32), q, k, v)}

    return _graph(build)


def _layers() -> Graph:
    """Repeated layers, with a state for each."""

    def build(b: GraphBuilder) -> Mapping[str, Value]:
        x = b.input("x", TensorType((6, 40), F32))
        outputs = {}
        old = [b.input(f"cache.{layer}", TensorType((6, 40), F32)) for layer in range(3)]
        for layer in range(3):
            y = b.add(Linear(F32), x, b.parameter(f"layers.{layer}.w", TensorType((40, 40), F32)))
            y = b.add(Binary("subtract"), b.add(Unary("tanh"), y), old[layer])
            outputs[f"cache.{layer}"] = y
            x = b.add(Binary("add"), x, y)
        return {**outputs, "y": x}

    return roll(_graph(build), PassOptions())


def _gather() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        ids = b.input("ids", TensorType((2, 70), DType.INT64))
        # Not the first axis: an index out of range that is not refused addresses a row of the next table.
        rows = b.add(Gather(1), b.parameter("tables", TensorType((3, ROWS, 24), F32)), ids)
        return {"y": b.add(Unary("relu"), rows)}

    return _graph(build)


def _reduce() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        # Many maxima of few numbers, so that each number is one of them in a draw; all negative, as a relu would show.
        x = b.input("x", TensorType((12, 35, 20), F32))
        negative = b.add(Binary("subtract"), x, b.scalar(2000.0))
        return {"sum": b.add(Reduce("sum", (1,), False), x), "max": b.add(Reduce("max", (0, 2), True), negative)}

    return _graph(build)


def _ranks() -> Graph:
    def build(b: GraphBuilder) -> Mapping[str, Value]:
        x, w = b.input("x", TensorType((20, 64), F32)), b.parameter("w", TensorType((48, 64), F32))
        mine = (b.add(RankSlice(1, 1, (64,), (2,), 2), entry) for entry in (x, w))
        return {"y": b.add(Unary("tanh"), b.add(AllReduce(2), b.add(Linear(F32), *mine)))}

    return _graph(build)


def _meetings() -> Graph:
    """Repeated layers with a collective in each."""

    def build(b: GraphBuilder) -> Mapping[str, Value]:
        x = b.input("x", TensorType((6, 40), F32))
        for name, half in _HALVES:
            w = b.parameter(name, TensorType((40, 40), F32))
            mine = (b.add(half, entry) for entry in (x, w))
            x = b.add(Binary("subtract"), b.add(Unary("tanh"), b.add(AllReduce(2), b.add(Linear(F32), *mine))), x)
        return {"y": x}

    return roll(_graph(build), PassOptions())
