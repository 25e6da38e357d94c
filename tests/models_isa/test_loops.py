"""Layers become loops, whatever is cast on the way into them."""

import numpy as np
import pytest

from nxpipe.emulator.core.machine import Machine
from nxpipe.emulator.ir.builder import GraphBuilder
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.program import Loop
from nxpipe.emulator.lower import lower
from nxpipe.emulator.ops import Binary, Cast
from nxpipe.emulator.passes import PassOptions
from nxpipe.emulator.passes.roll import roll
from nxpipe.emulator.run.fast import execute
from tests.models_isa.small import compiled, wanted


@pytest.mark.sample(8)
@pytest.mark.parametrize("autocast", ["none", "matmult", "all"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_layers_are_one_loop_in_every_autocast_mode(autocast: str, phase: str) -> None:
    (repeat,) = compiled(wanted("llama", "LlamaForCausalLM", phase), autocast).graph.repeats
    assert repeat.count == 3


def test_a_loop_of_nothing_but_what_the_host_does_to_weights_hands_on_what_it_made() -> None:
    """The casts repeat, and their readers, each of another kind, do not."""
    builder = GraphBuilder()
    kind = TensorType((3, 4), DType.FLOAT32)
    weights = [builder.parameter(f"layer.{number}", kind) for number in range(4)]
    casts = [builder.add(Cast(DType.BFLOAT16), weight) for weight in weights]
    y = x = builder.input("x", TensorType((3, 4), DType.BFLOAT16))
    for name, cast in zip(("add", "multiply", "maximum", "subtract"), reversed(casts), strict=True):
        y = builder.add(Binary(name), y, cast)
    builder.output("y", y)
    graph = roll(builder.build(), PassOptions())
    assert [repeat.given.keys() == {casts[0]} for repeat in graph.repeats] == [True]
    chance = np.random.default_rng(0)
    parameters = {name: chance.standard_normal((3, 4)).astype(np.float32) for name in graph.parameters}
    inputs = {"x": np.ones(x.type.shape, np.float32)}
    program = lower(graph, "v2")
    assert any(isinstance(step, Loop) for step in program.body)
    machine = Machine(program)
    for name, array in {**parameters, **inputs}.items():
        machine.write(name, array)
    machine.execute()
    np.testing.assert_array_equal(machine.read("y"), execute(graph, parameters, inputs)["y"])
