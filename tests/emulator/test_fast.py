"""Execution: what is accepted, what is refused, and what a loaded graph promises."""

import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nxpipe.emulator.capture import example_inputs
from nxpipe.emulator.errors import ExecutionError, MissingTensor, WrongTensor
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.ops import Binary, Cast, Gather, Linear, Unary
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import LoadedGraph, execute
from tests.emulator.models import captured, request

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def classifier(dtype: DType = F32) -> Graph:
    builder = GraphBuilder()
    ids = builder.input("ids", TensorType((3,), DType.INT64))
    rows = builder.add(Gather(0), builder.parameter("table", TensorType((5, 4), dtype)), ids)
    logits = builder.add(Linear(dtype), rows, builder.parameter("head", TensorType((2, 4), dtype)))
    builder.output("logits", logits)
    builder.output("ids", ids)
    return builder.build()


def tensors() -> tuple[dict[str, Array], dict[str, Array]]:
    generator = np.random.default_rng(0)
    parameters = {"table": generator.standard_normal((5, 4)), "head": generator.standard_normal((2, 4))}
    return {name: array.astype(np.float32) for name, array in parameters.items()}, {"ids": np.array([4, 0, 2])}


def test_outputs_come_by_name_and_inputs_may_be_outputs() -> None:
    parameters, inputs = tensors()
    found = execute(classifier(), parameters, inputs)
    assert found["ids"].tolist() == [4, 0, 2]
    np.testing.assert_allclose(found["logits"], parameters["table"][[4, 0, 2]] @ parameters["head"].T, rtol=1e-6)


def test_a_missing_parameter_is_named() -> None:
    parameters, inputs = tensors()
    del parameters["head"]
    with pytest.raises(MissingTensor, match=r"parameter 'head' is missing; the graph needs it as f32\[2,4\]"):
        execute(classifier(), parameters, inputs)


def test_a_missing_input_is_named() -> None:
    with pytest.raises(MissingTensor, match="input 'ids' is missing"):
        execute(classifier(), tensors()[0], {})


def test_an_input_that_the_graph_does_not_take_is_named() -> None:
    parameters, inputs = tensors()
    with pytest.raises(ExecutionError, match="no input 'mask'; it takes ids"):
        execute(classifier(), parameters, inputs | {"mask": np.ones(3)})


@pytest.mark.parametrize(
    ("name", "array"),
    [("ids", np.zeros(4, np.int64)), ("ids", np.zeros(3, np.float32)), ("ids", np.zeros(3, np.bool_))],
)
def test_an_input_of_another_type_is_refused(name: str, array: Array) -> None:
    with pytest.raises(WrongTensor, match=r"input 'ids' is .*, but the graph declares i64\[3\]"):
        execute(classifier(), tensors()[0], {name: array})


def test_a_parameter_of_another_shape_is_refused() -> None:
    parameters, inputs = tensors()
    with pytest.raises(WrongTensor, match=r"parameter 'head' is float32\[4, 2\], but the graph declares f32\[2,4\]"):
        execute(classifier(), parameters | {"head": parameters["head"].T}, inputs)


def test_parameters_may_come_in_bfloat16_and_are_the_same_as_rounded_float32() -> None:
    parameters, inputs = tensors()
    graph = classifier(BF16)
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in parameters.items()}
    expected = execute(graph, parameters, inputs)["logits"]
    assert np.array_equal(execute(graph, half, inputs)["logits"], expected)
    assert np.array_equal(expected.astype(ml_dtypes.bfloat16).astype(np.float32), expected)


def test_a_loaded_graph_gives_the_same_answer_each_time_and_keeps_its_hands_off_its_arguments() -> None:
    parameters, inputs = tensors()
    before = {name: array.copy() for name, array in (parameters | inputs).items()}
    loaded = LoadedGraph(classifier(), parameters)
    first = loaded.run(inputs)
    first["logits"][:] = 0
    first["ids"][:] = 0
    second = loaded.run(inputs)
    assert np.array_equal(second["logits"], execute(classifier(), parameters, inputs)["logits"])
    assert np.abs(second["logits"]).max() > 0
    for name, array in (parameters | inputs).items():
        assert np.array_equal(array, before[name])


def test_of_two_large_weights_that_are_cast_the_originals_are_never_in_memory_together() -> None:
    builder = GraphBuilder()
    y = builder.input("x", TensorType((1, 4), F32))
    for name in ("first", "second", "third"):
        weight = builder.add(Cast(BF16), builder.parameter(name, TensorType((4, 4), F32)))
        y = builder.add(Linear(F32), builder.add(Cast(BF16), y), weight)
    builder.output("y", y)
    alive: list[weakref.ref[Array]] = []

    class Lazy(dict[str, Array]):
        def __getitem__(self, name: str) -> Array:
            assert all(reference() is None for reference in alive)
            made = np.full((4, 4), 1 / 3, np.float32)
            alive.append(weakref.ref(made))
            return made

    LoadedGraph(builder.build(), Lazy.fromkeys(("first", "second", "third"), np.empty(0)))
    assert len(alive) == 3


def test_weights_that_need_no_rounding_are_not_copied() -> None:
    graph, (parameters, _) = classifier(BF16), tensors()
    exact = {name: np.round(array).astype(np.float32) for name, array in parameters.items()}
    loaded = LoadedGraph(graph, exact)
    assert all(any(np.shares_memory(array, held) for held in loaded._loaded.values()) for array in exact.values())


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    calls = 0

    class Counting(Unary, name="counting"):
        def compute(self, x: Array) -> Array:
            nonlocal calls
            calls += 1
            return super().compute(x)

    try:
        builder = GraphBuilder()
        x = builder.input("x", TensorType((2,), F32))
        weight = builder.add(Counting("exp"), builder.parameter("w", TensorType((2,), F32)))
        builder.output("y", builder.add(Binary("add"), x, weight))
        loaded = LoadedGraph(builder.build(), {"w": np.ones(2, np.float32)})
        for _ in range(3):
            loaded.run({"x": np.zeros(2, np.float32)})
        assert calls == 1
    finally:
        from nxpipe.emulator.ops import OPERATORS

        del OPERATORS["counting"]


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that work held at one time beyond what there was; numpy reports its arrays to the tracer."""
    tracemalloc.start()
    try:
        kept = work()
        peak = tracemalloc.get_traced_memory()[1]
        del kept
        return peak
    finally:
        tracemalloc.stop()


class MadeWhenAsked(dict[str, Array]):
    """Weights as a checkpoint gives them: nobody else keeps them in memory."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(dict.fromkeys(graph.parameters, np.empty(0)))
        self._types = {name: value.type for name, value in graph.parameters.items()}
        self.nbytes = sum(type_.nbytes for type_ in self._types.values())

    def __getitem__(self, name: str) -> Array:
        return np.random.default_rng(0).standard_normal(self._types[name].shape, dtype=np.float32)


# As in a Llama of a billion parameters, the vocabulary is a fifth of all weights, and serves at both ends.
_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 4000}


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_llama_takes_at_most_one_and_a_half_times_its_weights(phase: str) -> None:
    wanted = replace(request("llama", "text-generation", 1, 16, tie_word_embeddings=True, **_WIDE), phase=phase)
    graph = run_passes(captured(wanted), PassOptions("matmult", "bf16"))
    parameters, inputs = MadeWhenAsked(graph), example_inputs(graph, wanted.config, seed=0)

    def load_and_run() -> object:
        loaded = LoadedGraph(graph, parameters)
        return loaded, loaded.run(inputs)

    assert parameters.nbytes < peak_of(load_and_run) <= 1.5 * parameters.nbytes


def test_a_value_is_freed_after_its_last_use() -> None:
    builder = GraphBuilder()
    y = x = builder.input("x", TensorType((1 << 18,), F32))
    for _ in range(20):
        y = builder.add(Binary("add"), builder.add(Unary("tanh"), y), x)
    builder.output("y", y)
    loaded, one = LoadedGraph(builder.build(), {}), np.ones(1 << 18, np.float32)
    assert peak_of(lambda: loaded.run({"x": one})) < 5 * one.nbytes


@pytest.mark.parametrize("rows", [1, 7, 128])
def test_a_run_gives_the_same_bits_each_time(rows: int) -> None:
    builder, generator = GraphBuilder(), np.random.default_rng(0)
    x = builder.input("x", TensorType((rows, 256), F32))
    up = builder.add(Linear(F32), builder.add(Cast(BF16), x), builder.add(Cast(BF16), _parameter(builder, "up", 1024)))
    down = builder.add(Linear(F32), builder.add(Unary("gelu"), up), _parameter(builder, "down", 256, 1024))
    builder.output("y", builder.add(Binary("add"), down, x))
    graph = builder.build()
    loaded = LoadedGraph(graph, MadeWhenAsked(graph))
    inputs = {"x": generator.standard_normal((rows, 256), dtype=np.float32)}
    assert len({loaded.run(inputs)["y"].tobytes() for _ in range(5)}) == 1


def _parameter(builder: GraphBuilder, name: str, outputs: int, width: int = 256) -> Value:
    return builder.parameter(name, TensorType((outputs, width), F32))
