"""Whole models on XLA's CPU agree with `fast` as closely as `fast` agrees with PyTorch; decoders step by step."""

import pytest

from nxpipe.emulator.capture import example_inputs
from nxpipe.emulator.compile import shard_graph
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks
from tests.emulator.models import captured, relative_error, request, weights
from tests.hlo.models import TASKS, TOLERANCE, compiled, degrees, generation_distance, loaded, model_distance, requests


@pytest.mark.slow
@pytest.mark.parametrize("family", TASKS)
def test_every_phase_of_a_model_agrees_on_all_degrees(family: str) -> None:
    for wanted in requests(family):
        for degree in degrees(compiled((family, wanted.phase))):
            assert model_distance(family, wanted, degree) < TOLERANCE, (wanted.phase, degree)


@pytest.mark.sample(8)
@pytest.mark.parametrize("family", ["bert", "gemma2", "llama", "mixtral", "resnet", "swin", "t5", "whisper"])
def test_a_model_agrees_on_two_ranks(family: str) -> None:
    *_, wanted = requests(family)
    degree = max(degree for degree in degrees(compiled((family, wanted.phase))) if degree <= 2)
    assert model_distance(family, wanted, degree) < TOLERANCE


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "degree"), [("llama", 2), ("gemma2", 1), ("falcon", 2), ("gpt2", 4)])
def test_eight_steps_of_decoding_write_the_caches_where_they_lie(name: str, degree: int) -> None:
    error, in_place = generation_distance(name, degree)
    assert error < 2 * TOLERANCE
    assert in_place


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3"])
def test_autocast_is_that_of_the_graph(kind: str) -> None:
    """Rounded numbers agree as far as a sum in another order may cross the middle between two of them."""
    wanted = request("bert", "fill-mask")
    program = shard_graph(run_passes(captured(wanted), PassOptions("matmult", kind)), PassOptions(tensor_parallel=2))
    parameters, inputs = weights(wanted), example_inputs(captured(wanted), wanted.config, seed=3)
    expected = LoadedProgram(program, LoadedRanks(program.graph, parameters)).run(inputs)
    found = LoadedProgram(program, loaded(program, parameters)).run(inputs)
    unit = 2.0**-8 if kind == "bf16" else 2.0**-4
    assert all(relative_error(found[name], expected[name]) < unit for name in expected)
