"""What programs take of a core: counted by hand on small graphs, held against the written-out graph on deep ones."""

import pytest

from nxpipe.emulator.analysis.graph_memory import capacity, code_bytes, footprints, peak_bytes, states
from nxpipe.emulator.capture import CaptureRequest, capture
from nxpipe.emulator.compile import compile_graph
from nxpipe.emulator.hardware import CORES, INSTANCES, instance
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.graph import Graph
from nxpipe.emulator.ir.nodes import Value
from nxpipe.emulator.ir.repeat import unroll
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.ops import Binary, Broadcast, Cast, IndexUpdate, MatMul, Reshape, Transpose, Unary
from nxpipe.emulator.passes import PassOptions

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
}

_ROW = TensorType((8, 8), DType.FLOAT32)
_BYTES = 256


def built(*outputs: Value, builder: GraphBuilder) -> Graph:
    for number, value in enumerate(outputs):
        builder.output(f"out.{number}", value)
    return builder.build()


def test_a_value_is_held_from_its_definition_to_its_last_reader() -> None:
    b = GraphBuilder()
    x, w = b.input("x", _ROW), b.parameter("w", _ROW)
    first = b.add(MatMul(DType.FLOAT32), x, w)
    second = b.add(MatMul(DType.FLOAT32), first, w)
    third = b.add(MatMul(DType.FLOAT32), second, w)
    # At the second product `first` and `second` are there; at the third, `second` alone, for outputs are counted apart.
    assert peak_bytes(built(third, builder=b)) == 2 * _BYTES


def test_a_value_with_a_late_reader_is_held_until_then() -> None:
    b = GraphBuilder()
    x, w = b.input("x", _ROW), b.parameter("w", _ROW)
    first = b.add(MatMul(DType.FLOAT32), x, w)
    second = b.add(MatMul(DType.FLOAT32), first, w)
    third = b.add(MatMul(DType.FLOAT32), second, w)
    last = b.add(MatMul(DType.FLOAT32), third, first)
    assert peak_bytes(built(last, builder=b)) == 3 * _BYTES


def test_an_elementwise_result_takes_the_place_of_a_dying_operand() -> None:
    b = GraphBuilder()
    x = b.input("x", _ROW)
    value = b.add(MatMul(DType.FLOAT32), x, x)
    for _ in range(5):
        value = b.add(Unary("exp"), value)
    assert peak_bytes(built(b.add(MatMul(DType.FLOAT32), value, x), builder=b)) == _BYTES


def test_views_and_casts_of_weights_take_nothing() -> None:
    b = GraphBuilder()
    w = b.parameter("w", _ROW)
    narrow = b.add(Cast(DType.BFLOAT16), w)
    turned = b.add(Transpose((1, 0)), narrow)
    wide = b.add(Broadcast((4, 64)), b.add(Reshape((64,)), turned))
    assert peak_bytes(built(b.add(Binary("add"), wide, wide), builder=b)) == 0


def test_a_view_keeps_what_it_looks_at() -> None:
    b = GraphBuilder()
    x = b.input("x", _ROW)
    held = b.add(MatMul(DType.FLOAT32), x, x)
    view = b.add(Reshape((64,)), held)
    other = b.add(MatMul(DType.FLOAT32), x, x)
    product = b.add(MatMul(DType.FLOAT32), other, x)
    graph = built(b.add(Binary("add"), b.add(Reshape((8, 8)), view), product), builder=b)
    assert peak_bytes(graph) == 3 * _BYTES


def test_state_is_updated_where_it_lies() -> None:
    b = GraphBuilder()
    state = b.input("cache", _ROW)
    place = b.input("place", TensorType((1,), DType.INT64))
    row = b.input("row", TensorType((1, 8), DType.FLOAT32))
    b.output("cache", b.add(IndexUpdate((0,), combine=""), state, row, place))
    graph = b.build()
    assert list(states(graph)) == ["cache"]
    assert peak_bytes(graph) == 0


def deep(model_phase: str, layers: int) -> Graph:
    config = {**LLAMA, "num_hidden_layers": layers}
    request = CaptureRequest(config, "text-generation", model_phase, 1, 16, "bfloat16")
    return compile_graph(request, PassOptions("matmult"))


@pytest.fixture(scope="module", params=["prefill", "decode"])
def rolled(request: pytest.FixtureRequest) -> Graph:
    return deep(request.param, 8)


@pytest.mark.sample(2)
def test_layers_stored_once_take_what_they_take_written_out(rolled: Graph) -> None:
    whole = unroll(rolled)
    assert len(whole.nodes) > len(rolled.nodes)
    assert footprints([rolled], [1, 2]) == footprints([whole], [1, 2])


def test_two_phases_share_weights_and_cache() -> None:
    prefill, decode = deep("prefill", 2), deep("decode", 2)
    (alone,), (both,) = footprints([decode], [1])[0], footprints([prefill, decode], [1])[0]
    assert (both.weights, both.state) == (alone.weights, alone.state)
    assert both.activations == max(peak_bytes(prefill), peak_bytes(decode))


def test_weights_and_cache_are_divided_among_the_ranks() -> None:
    (one, two), refused = footprints([deep("decode", 2)], [1, 2])
    assert not refused
    assert two.state * 2 == one.state
    assert one.weights / 2 <= two.weights < one.weights * 0.6


def test_a_degree_that_the_model_cannot_have_is_refused_with_the_reason() -> None:
    found, refused = footprints([deep("decode", 2)], [1, 64])
    assert [one.degree for one in found] == [1]
    assert "64" in refused[64]


def test_an_activation_grows_with_the_tokens_that_are_read() -> None:
    request = CaptureRequest(dict(LLAMA), "text-generation", "forward", 1, 8, "bfloat16")
    short = capture(request)
    long = capture(CaptureRequest(dict(LLAMA), "text-generation", "forward", 1, 64, "bfloat16"))
    assert peak_bytes(long) > 4 * peak_bytes(short)


def test_the_memory_of_a_core_is_the_documented_one() -> None:
    gib = 1 << 30
    documented = {"inf2.xlarge": 16, "trn1.2xlarge": 16, "trn1.32xlarge": 16, "trn2.48xlarge": 24}
    assert {name: capacity(instance(name)) // gib for name in documented} == documented


def test_degrees_are_those_of_the_documentation_that_the_instance_has_cores_for() -> None:
    assert instance("inf2.48xlarge").degrees == (1, 2, 4, 8, 24)
    assert instance("inf2.xlarge").degrees == (1, 2)
    assert instance("trn1.32xlarge").degrees == (1, 2, 8, 16, 32)
    assert instance("trn2.48xlarge").degrees == (1, 2, 4, 8, 16, 32, 64)


def test_code_is_counted_for_each_physical_core() -> None:
    for target in INSTANCES.values():
        assert code_bytes(target) == CORES[target.core].lnc_default * (96 << 20)
