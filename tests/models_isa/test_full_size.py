"""A published model at its full size, carried out instruction by instruction."""

import numpy as np
import pytest

from nxpipe.emulator.capture import CaptureRequest, example_inputs, parameter_specs, reference_outputs
from nxpipe.emulator.compile import compile_program
from nxpipe.emulator.passes import PassOptions
from nxpipe.pipeline.models.catalogue import find
from nxpipe.pipeline.models.weights import RandomWeights, Tensors
from tests.models_isa.small import by_graph, on_cores, worst


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bert_base_answers_as_its_graph_and_as_pytorch_does() -> None:
    known = find("bert-base-uncased")
    assert known is not None
    request = CaptureRequest(known.config, known.task, "forward", 1, 128, "float32")
    program = compile_program(request, PassOptions("none"))
    weights = Tensors(RandomWeights(0), parameter_specs(request))
    inputs = example_inputs(program.whole, request.config, seed=0)
    found = on_cores(program, weights, "v2").run(inputs)
    assert all(np.isfinite(array).all() for array in found.values())
    assert worst(found, by_graph(program, weights).run(inputs)) < 1e-4
    assert worst(found, reference_outputs(request, dict(weights), inputs)) < 1e-4
