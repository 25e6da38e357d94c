"""The stand-in nrtpy refuses what the pages of AWS's nrtpy do not allow."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.run.devices.faults import DeviceFailure
from nxpipe.emulator.run.devices.nrtpy_runtime import translated
from nxpipe.emulator.run.status import DeviceMemoryExhausted, LookupOutOfBounds, RuntimeFault, WrongGeneration
from tests.runtime.devices import neff
from tests.runtime.devices.conftest import Machine
from tests.runtime.devices.programs import addition

X = np.ones(4, np.float32)


@pytest.fixture
def nrtpy(machine: Machine) -> Iterator[Any]:
    machine()
    module = importlib.import_module("nrtpy")
    yield module
    module.reset()


def test_the_documented_example_computes(nrtpy: Any, tmp_path: Path) -> None:
    model = nrtpy.NrtpyModel.load_from_neff(str(addition("nrtpy", tmp_path)))
    tensors = {name: nrtpy.NrtpyTensor.from_numpy(X, name=name) for name in model.input_tensors_info}
    outputs = model(inputs=tensors)
    assert outputs["y"].dtype == "V4"
    assert outputs["y"].numpy().view(np.float32).tolist() == [2.0] * 4
    assert model(inputs=tensors, outputs=outputs) is None
    assert {name: (info.size, info.shape) for name, info in model.output_tensors_info.items()} == {"y": (16, (4,))}
    stats = model.benchmark(inputs=tensors, mode="host")
    assert (stats.iterations, stats.warmup_iterations, len(stats.durations_ms)) == (5, 5, 5)


@pytest.mark.parametrize("cores", [3, [0, "1"], [-1]])
def test_cores_that_are_no_list_of_numbers_are_refused(cores: Any, nrtpy: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        nrtpy.configure(visible_cores=cores)


def test_an_active_runtime_is_not_configured_and_a_reset_invalidates_tensors(nrtpy: Any) -> None:
    tensor = nrtpy.NrtpyTensor.from_numpy(X)
    with pytest.raises(nrtpy.NrtpyError, match="active"):
        nrtpy.configure(visible_cores=[0])
    nrtpy.reset()
    nrtpy.configure(visible_cores=range(1))
    with pytest.raises(RuntimeError):
        tensor.numpy()


Misuse = Callable[[Any, Any, Path], Any]


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda nrtpy, model, path: nrtpy.NrtpyTensor.from_numpy([1.0]), "TypeError"),
        (lambda nrtpy, model, path: nrtpy.NrtpyTensor.from_numpy(X, core_id="0"), "TypeError"),
        (lambda nrtpy, model, path: nrtpy.NrtpyTensor.from_numpy(X).write_from_numpy(X[:2]), "ValueError"),
        (lambda nrtpy, model, path: nrtpy.NrtpyModel.load_from_neff(path, core_id=np.int64(0)), "TypeError"),
        (lambda nrtpy, model, path: nrtpy.NrtpyModel.load_from_neff(path, world_size=2), "NrtpyError"),
        (lambda nrtpy, model, path: nrtpy.NrtpyModel.load_from_neff(path, vnc_count=2), "TypeError"),
        (lambda nrtpy, model, path: model(inputs={"x": X, "w": X}), "TypeError"),
        (lambda nrtpy, model, path: model([X, X]), "TypeError"),
        (lambda nrtpy, model, path: model.benchmark({}, benchmark_iter=0), "ValueError"),
        (lambda nrtpy, model, path: model.benchmark({}, mode="wall"), "ValueError"),
        (lambda nrtpy, model, path: model(inputs={"x": nrtpy.NrtpyTensor.from_numpy(X)}), "NrtError"),
        (lambda nrtpy, model, path: model.unload(), "AttributeError"),
        (lambda nrtpy, model, path: nrtpy.get_nrtpy_singleton().free_tensor(X), "TypeError"),
        (lambda nrtpy, model, path: nrtpy.memory_stats(), "AttributeError"),
    ],
)
def test_whatever_the_documentation_does_not_allow_is_refused(
    misuse: Misuse, error: str, nrtpy: Any, tmp_path: Path
) -> None:
    path = addition("nrtpy", tmp_path)
    model = nrtpy.NrtpyModel.load_from_neff(path)
    with pytest.raises((TypeError, ValueError, AttributeError, RuntimeError)) as raised:
        misuse(nrtpy, model, path)
    assert type(raised.value).__name__ == error


def test_a_freed_tensor_is_refused(nrtpy: Any) -> None:
    tensor = nrtpy.NrtpyTensor.from_numpy(X)
    nrtpy.get_nrtpy_singleton().free_tensor(tensor)
    with pytest.raises(nrtpy.NrtpyError, match="freed"):
        tensor.numpy()


def test_a_file_for_another_target_fails_as_documented(nrtpy: Any, tmp_path: Path) -> None:
    with pytest.raises(nrtpy.NrtError, match=r"NRT_FAILURE\(6\)"):
        nrtpy.NrtpyModel.load_from_neff(neff.addition(arch="inf2").write(tmp_path / "other.neff"))
    with pytest.raises(nrtpy.NrtError, match=r"NRT_FAILURE\(1\): Failed to load model"):
        nrtpy.NrtpyModel.load_from_neff(tmp_path / "none.neff")


@pytest.mark.parametrize(
    ("message", "on_load", "fault"),
    [
        ("NRT Error NRT_RESOURCE(4): Failed to allocate tensor", False, DeviceMemoryExhausted),
        ("NrtError: NRT_EXEC_OOB(1006)", False, LookupOutOfBounds),
        ("NRT Error NRT_FAILURE(6): Failed to load model", True, WrongGeneration),
        ("the tensor was freed", False, DeviceFailure),
    ],
)
def test_a_message_with_a_status_becomes_its_error(message: str, on_load: bool, fault: type[RuntimeFault]) -> None:
    with pytest.raises(fault, match=r"^trying failed"), translated("trying", on_load=on_load):
        raise RuntimeError(message)
