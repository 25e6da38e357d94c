"""Small whole models in three forms: programs on emulated cores, graphs with their operators' numerics, PyTorch."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from nxpipe.emulator.capture import CaptureRequest, capture, example_inputs, reference_outputs
from nxpipe.emulator.compile import CompiledGraph, emit, shard_graph
from nxpipe.emulator.executable.executable import from_bytes, to_bytes
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.passes import PassOptions, run_passes
from nxpipe.emulator.run.fast import LoadedProgram, LoadedRanks
from nxpipe.emulator.run.isa import Isa
from nxpipe.pipeline.models.source import resolve
from tests.emulator.models import relative_error, small_config, weights
from tests.pipeline.conftest import write_model

# Three layers where the number is free, so that there is a loop over them.
DEPTHS = {"num_hidden_layers": 3, "n_layers": 3, "n_layer": 3, "num_layers": 3}


@cache
def wanted(family: str, architecture: str | None, phase: str, sequence: int = 12) -> CaptureRequest:
    """The command line's request for this model's config.json."""
    config = small_config(family)
    if "attention_types" not in config:  # GPT-Neo has a type for each layer
        config |= {name: depth for name, depth in DEPTHS.items() if name in config}
    config |= {"architectures": [architecture]} if architecture else {}
    with TemporaryDirectory() as folder:
        source = resolve(str(write_model(Path(folder) / family, json.loads(json.dumps(config)))))
    request = CaptureRequest(source.config, source.task, phase, 2, sequence, "float32")
    return replace(request, capacity=sequence) if phase == "prefill" else request


@cache
def compiled(request: CaptureRequest, autocast: str = "none", degree: int = 1, core: str = "v2") -> CompiledGraph:
    options = PassOptions(autocast, target={"v2": "inf2", "v3": "trn2"}[core])
    return shard_graph(run_passes(capture(request), options), replace(options, tensor_parallel=degree))


def on_cores(
    program: CompiledGraph, parameters: Mapping[str, Array], core: str, order: str = "hostile"
) -> LoadedProgram:
    """Run a program from its file format, as stored in an artifact."""
    executable = from_bytes(to_bytes(emit(program, core)))
    return LoadedProgram(program, Isa(executable, order=order).load(parameters))


def by_graph(program: CompiledGraph, parameters: Mapping[str, Array]) -> LoadedProgram:
    return LoadedProgram(program, LoadedRanks(program.graph, parameters))


def inputs_of(program: CompiledGraph, request: CaptureRequest) -> dict[str, Array]:
    """Random inputs; the second sequence is shorter."""
    inputs = example_inputs(program.whole, request.config, seed=3)
    if "attention_mask" in inputs:
        inputs["attention_mask"][-1, -3:] = 0
    return inputs


def worst(found: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert np.array_equal(np.isfinite(found[name]), np.isfinite(array)), name
    return max(relative_error(found[name], array) for name, array in expected.items() if np.any(array))


def require_agreement(request: CaptureRequest, core: str = "v2", **how: Any) -> None:
    """Require agreement in float32 up to the order of sums, PyTorch's included."""
    program, parameters = compiled(request, core=core, **how), weights(request)
    inputs = inputs_of(program, request)
    found = on_cores(program, parameters, core).run(inputs)
    assert worst(found, by_graph(program, parameters).run(inputs)) < 5e-6
    truth = reference_outputs(request, parameters, inputs)
    assert worst({name: found[name] for name in truth}, truth) < 5e-5
