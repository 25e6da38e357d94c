"""Every implementation keeps the contract of docs/reference/devices.md: the emulator, libnrt and nrtpy on stand-ins."""

import os
import sys
from ctypes import byref, c_uint32
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.errors import CompileError
from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices import open_runtime, resolved
from nxpipe.emulator.run.devices.emulated_runtime import EmulatedRuntime
from nxpipe.emulator.run.devices.faults import DeviceFailure, HardwareFault, NoDevice
from nxpipe.emulator.run.devices.libnrt import Library
from nxpipe.emulator.run.devices.libnrt_runtime import LibnrtRuntime
from nxpipe.emulator.run.devices.nrtpy_runtime import NrtpyRuntime
from nxpipe.emulator.run.devices.protocol import (
    DeviceModel,
    DeviceRuntime,
    DeviceTensor,
    TensorInfo,
    Timing,
    match,
    plain,
)
from nxpipe.emulator.run.status import (
    BadInput,
    CoresUnavailable,
    DeviceMemoryExhausted,
    InvalidLoad,
    LookupOutOfBounds,
    RuntimeClosed,
    Status,
    Unloaded,
    WrongGeneration,
)
from tests.runtime.devices import neff
from tests.runtime.devices.conftest import Machine, Opener
from tests.runtime.devices.programs import KINDS, STATE, accumulator, addition, lookup

pytestmark = pytest.mark.sample(2, "stand-in of libnrt")

kinds = pytest.mark.parametrize("kind", KINDS)
devices = pytest.mark.parametrize("kind", ["libnrt", "nrtpy"])

Tensors = dict[str, DeviceTensor]
X, W = np.arange(4, dtype=np.float32), np.full(4, 0.5, np.float32)


def allocated(runtime: DeviceRuntime, model: DeviceModel) -> tuple[Tensors, Tensors]:
    """A tensor for each input and output; a state has one tensor for both."""
    inputs = {name: runtime.allocate(info.nbytes, name=name) for name, info in model.inputs.items()}
    states = {plain(name): tensor for name, tensor in inputs.items()}
    outputs = {
        name: states[name] if name in states else runtime.allocate(info.nbytes, name=name)
        for name, info in model.outputs.items()
    }
    return inputs, outputs


def floats(tensor: DeviceTensor) -> list[float]:
    return [float(number) for number in tensor.read().view(np.float32)]


def input_of(inputs: Tensors, name: str) -> DeviceTensor:
    return next(tensor for key, tensor in inputs.items() if plain(key) == name)


# The type checker compares each with the protocol, which `open_runtime` returns.
RUNTIMES: tuple[type[DeviceRuntime], ...] = (EmulatedRuntime, LibnrtRuntime, NrtpyRuntime)

# Programs and tensors


@kinds
def test_a_program_computes_on_the_bytes_of_its_tensors(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    inputs["x"].write(X)
    inputs["w"].write(W)
    model.execute(inputs, outputs)
    assert floats(outputs["y"]) == [0.5, 1.5, 2.5, 3.5]
    inputs["x"].write(X[::-1])
    model.execute(inputs, outputs)
    assert floats(outputs["y"]) == [3.5, 2.5, 1.5, 0.5]


@kinds
def test_a_state_is_updated_in_place_if_one_tensor_is_bound_to_both_sides(
    kind: str, opened: Opener, tmp_path: Path
) -> None:
    runtime = opened(kind)
    model = runtime.load(accumulator(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    total = input_of(inputs, STATE)
    total.write(np.zeros(4, np.float32))
    inputs["x"].write(X)
    for expected in (X, 2 * X, 3 * X):
        model.execute(inputs, outputs)
        assert floats(outputs["y"]) == floats(total) == list(expected)


@kinds
def test_a_state_with_two_tensors_leaves_its_input_unchanged(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(accumulator(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    outputs[STATE] = runtime.allocate(16, name="apart")
    total = input_of(inputs, STATE)
    total.write(W)
    inputs["x"].write(X)
    for _ in range(2):
        model.execute(inputs, outputs)
        assert floats(total) == list(W)
        assert floats(outputs[STATE]) == list(X + W)


@kinds
def test_programs_share_tensors_on_a_core(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    add, sums = runtime.load(addition(kind, tmp_path)), runtime.load(accumulator(kind, tmp_path))
    inputs, outputs = allocated(runtime, add)
    inputs["x"].write(X)
    inputs["w"].write(W)
    add.execute(inputs, outputs)
    others = {name: outputs["y"] if name == "x" else inputs["w"] for name in sums.inputs}
    sums.execute(others, {STATE: inputs["w"], "y": inputs["x"]})
    assert floats(inputs["x"]) == list(X + 2 * W)


@kinds
def test_an_index_beyond_its_table_is_refused_and_the_model_still_runs(
    kind: str, opened: Opener, tmp_path: Path
) -> None:
    runtime = opened(kind)
    model = runtime.load(lookup(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    table = np.arange(24, dtype=np.float32)
    inputs["table"].write(table)
    inputs["ids"].write(np.array([1, 6], np.int32))
    with pytest.raises(LookupOutOfBounds):
        model.execute(inputs, outputs)
    inputs["ids"].write(np.array([5, 1], np.int32))
    model.execute(inputs, outputs)
    assert floats(outputs["y"]) == [*table[20:], *table[4:8]]


@kinds
def test_the_interface_is_read_back_from_the_program(kind: str, opened: Opener, tmp_path: Path) -> None:
    model = opened(kind).load(accumulator(kind, tmp_path))
    sizes = {"x": 16, STATE: 16}
    assert {plain(name): info.nbytes for name, info in model.inputs.items()} == sizes
    assert {name: info.nbytes for name, info in model.outputs.items()} == {"y": 16, STATE: 16}
    assert sorted(match(sizes, model.inputs, "input")) == [STATE, "x"]


@kinds
def test_a_binding_must_have_each_tensor_of_the_program_with_its_size_on_its_core(
    kind: str, opened: Opener, tmp_path: Path
) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    short, far = runtime.allocate(8, name="short"), runtime.allocate(16, core=1, name="far")
    for wrong, reason in (
        ({"x": inputs["x"]}, "'w' is missing"),
        ({**inputs, "z": inputs["x"]}, "'z' is unknown"),
        ({**inputs, "w": short}, "'w' has 8 bytes for 16"),
        ({**inputs, "w": far}, "'w' is on core 1, and the program on core 0"),
    ):
        with pytest.raises(BadInput, match=reason):
            model.execute(wrong, outputs)
    with pytest.raises(BadInput, match="'y' is missing"):
        model.execute(inputs, {})


@kinds
def test_a_tensor_is_written_whole(kind: str, opened: Opener) -> None:
    tensor = opened(kind).allocate(16, name="x")
    with pytest.raises(BadInput, match="has 16 bytes, and 12 are written"):
        tensor.write(np.zeros(3, np.float32))
    tensor.write(X.reshape(2, 2).T)  # its elements in their order, not its memory
    assert floats(tensor) == [0.0, 2.0, 1.0, 3.0]


@kinds
@pytest.mark.parametrize(("nbytes", "name"), [(0, "x"), (-1, "x"), (4, "x" * 256)])
def test_a_tensor_that_no_device_can_hold_is_refused(kind: str, nbytes: int, name: str, opened: Opener) -> None:
    with pytest.raises(InvalidLoad):
        opened(kind).allocate(nbytes, name=name)


# Memory and counters


@kinds
def test_memory_counters_agree_with_what_is_allocated_until_memory_is_full(
    kind: str, opened: Opener, tmp_path: Path
) -> None:
    runtime = opened(kind)
    before = runtime.counters()
    assert 0 <= before.memory_used < before.memory_limit
    model = runtime.load(addition(kind, tmp_path))
    loaded = runtime.counters().memory_used
    tensor = runtime.allocate(4096, name="large")
    assert runtime.counters().memory_used == loaded + 4096
    with pytest.raises(DeviceMemoryExhausted):
        runtime.allocate(before.memory_limit, name="larger")
    assert runtime.counters().memory_used == loaded + 4096
    tensor.free()
    model.unload()
    assert runtime.counters() == before
    assert runtime.counters(1).memory_used == 0


@devices
def test_a_program_that_does_not_fit_is_refused(kind: str, opened: Opener, tmp_path: Path) -> None:
    program = neff.addition(scratch=1 << 20).write(tmp_path / "large.neff")
    with pytest.raises(DeviceMemoryExhausted, match=r"loading large\.neff .* \(4\)"):
        opened(kind).load(program)


@kinds
def test_executions_are_counted_and_timed(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    for tensor in inputs.values():
        tensor.write(X)
    timing = model.time(inputs, outputs, runs=5, warmup=2)
    assert (timing.clock, len(timing.durations_ms)) == (("predicted", 1) if kind == "emulated" else ("host", 5))
    assert 0 < timing.p50_ms <= timing.p99_ms
    assert runtime.counters().executions == (0 if kind == "emulated" else 7)
    with pytest.raises(BadInput, match="time at least one run"):
        model.time(inputs, outputs, runs=0)


@pytest.mark.parametrize(
    ("kind", "clock"), [("emulated", "host"), ("emulated", "device"), ("libnrt", "device"), ("nrtpy", "predicted")]
)
def test_a_clock_that_an_implementation_lacks_is_refused(kind: str, clock: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    with pytest.raises(BadInput, match=clock):
        model.time(*allocated(runtime, model), runs=1, clock=clock)  # type: ignore[arg-type]


def test_nrtpy_measures_by_the_clock_of_the_device_and_says_when_nothing_was_traced(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = opened("nrtpy")
    model = runtime.load(addition("nrtpy", tmp_path))
    inputs, outputs = allocated(runtime, model)
    assert model.time(inputs, outputs, runs=3, clock="device").clock == "device"
    monkeypatch.setenv("STANDIN_TRACE", "none")
    with pytest.raises(DeviceFailure, match="no device execution events were captured"):
        model.time(inputs, outputs, runs=3, clock="device")


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.sampled_from([50.0, 90.0, 99.0, 100.0]))
def test_a_percentile_is_the_smallest_duration_that_so_many_do_not_exceed(
    durations: list[float], percent: float
) -> None:
    value = Timing("host", tuple(durations)).percentile(percent)
    assert value in durations
    assert sum(duration <= value for duration in durations) >= len(durations) * percent / 100
    assert sum(duration < value for duration in durations) < len(durations) * percent / 100


def test_every_implementation_has_the_protocol_that_a_runtime_is_opened_by(opened: Opener) -> None:
    assert [type(opened(kind)) for kind in KINDS] == list(RUNTIMES)


@kinds
def test_a_measurement_names_its_device(kind: str, opened: Opener) -> None:
    description = opened(kind).description
    assert (description.implementation, description.cores) == (kind, 2)
    assert description.family == ("trn1.2xlarge" if kind == "emulated" else "trn1")
    assert description.version == ("v2" if kind == "emulated" else "2.34.10.0")


# The end


@kinds
def test_objects_refuse_after_their_runtime_was_closed(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    model.execute(inputs, outputs)
    runtime.close()
    runtime.close()
    for attempt in (
        lambda: model.execute(inputs, outputs),
        lambda: inputs["x"].write(X),
        lambda: inputs["x"].read(),
        lambda: runtime.allocate(4),
        lambda: runtime.load(tmp_path),
        lambda: runtime.counters(),
        lambda: runtime.description,
    ):
        with pytest.raises(RuntimeClosed):
            attempt()
    model.unload()
    inputs["x"].free()


@kinds
def test_what_was_freed_is_refused_and_may_be_freed_again(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    model.execute(inputs, outputs)
    inputs["x"].free()
    inputs["x"].free()
    with pytest.raises(Unloaded):
        inputs["x"].read()
    with pytest.raises(Unloaded):
        model.execute(inputs, outputs)
    inputs["x"] = runtime.allocate(16, name="x")
    model.execute(inputs, outputs)
    model.unload()
    model.unload()
    with pytest.raises(Unloaded):
        model.execute(inputs, outputs)


@devices
def test_a_device_that_failed_is_closed_without_another_error(
    kind: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = machine()

    def fail() -> None:
        with open_runtime(kind, library=library) as runtime:  # type: ignore[arg-type]
            model = runtime.load(addition(kind, tmp_path))
            inputs, outputs = allocated(runtime, model)
            monkeypatch.setenv("STANDIN_FAULT", "nrt_execute=101")
            try:
                model.execute(inputs, outputs)
            finally:
                monkeypatch.setenv("STANDIN_FAULT", "nrt_unload=101")

    with pytest.raises(HardwareFault, match="the core must be reset"):
        fail()
    assert Library(library).status("nrt_get_visible_nc_count", byref(c_uint32())) == Status.NRT_CLOSED


@devices
def test_a_process_opens_one_runtime_once(kind: str, opened: Opener) -> None:
    runtime = opened(kind)
    for _ in range(2):
        with pytest.raises(DeviceFailure, match="opened before"):
            open_runtime(kind, library=os.environ["STANDIN_LIBRARY"])  # type: ignore[arg-type]
        runtime.close()


# What is absent or does not fit


@devices
def test_a_machine_without_a_device_is_one_sentence(kind: str, machine: Machine) -> None:
    with pytest.raises(NoDevice, match=r"^no Neuron device: the runtime found none; run on an Inferentia2 or Trainium"):
        open_runtime(kind, library=machine(family=""))  # type: ignore[arg-type]


@devices
def test_a_machine_without_the_library_is_one_sentence(kind: str, machine: Machine) -> None:
    missing = machine() + ".missing"
    machine(library=missing)
    with pytest.raises(NoDevice, match=r"^no Neuron device: .*install .*aws-neuronx-runtime-lib"):
        open_runtime(kind, library=missing)  # type: ignore[arg-type]


def test_a_machine_without_nrtpy_is_one_sentence() -> None:
    with pytest.raises(NoDevice, match=r"^no Neuron device: nrtpy cannot be imported .*; install the wheel nrtpy"):
        open_runtime("nrtpy")


def test_auto_is_nrtpy_where_it_is_installed(machine: Machine) -> None:
    machine()
    assert "nrtpy" not in sys.modules
    assert [resolved("auto"), resolved("emulated")] == ["nrtpy", "emulated"]


def test_auto_is_libnrt_elsewhere_and_never_the_emulator() -> None:
    assert resolved("auto") == "libnrt"
    with pytest.raises(InvalidLoad, match="unknown implementation 'cuda'; use auto, nrtpy, libnrt, emulated"):
        resolved("cuda")  # type: ignore[arg-type]


@kinds
def test_a_program_for_another_generation_is_refused(kind: str, opened: Opener, tmp_path: Path) -> None:
    if kind == "emulated":
        runtime = open_runtime("emulated", name="trn2.48xlarge")
        program = addition(kind, tmp_path)
    else:
        runtime = opened(kind)
        program = neff.addition(arch="trn2").write(tmp_path / "other.neff")
    with pytest.raises(WrongGeneration, match=r"instance|generation"):
        runtime.load(program)


@kinds
def test_a_file_that_is_no_program_is_refused(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    with pytest.raises(InvalidLoad, match=r"none\.neff cannot be read: No such file"):
        runtime.load(tmp_path / "none.neff")
    (tmp_path / "empty.neff").write_bytes(b"")
    with pytest.raises(InvalidLoad):
        runtime.load(tmp_path / "empty.neff")


@kinds
def test_a_core_that_the_process_does_not_have_is_refused(kind: str, opened: Opener, tmp_path: Path) -> None:
    with pytest.raises((InvalidLoad, CoresUnavailable)):
        opened(kind).load(addition(kind, tmp_path), core=2)


@kinds
def test_a_rank_outside_of_its_world_is_refused(kind: str, opened: Opener, tmp_path: Path) -> None:
    with pytest.raises(InvalidLoad, match="rank 2 is not one of 2"):
        opened(kind).load(addition(kind, tmp_path), rank=2, world=2)


@devices
def test_ranks_without_the_address_of_rank_0_are_refused(
    kind: str, opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURON_RT_ROOT_COMM_ID", raising=False)
    with pytest.raises(InvalidLoad, match="NEURON_RT_ROOT_COMM_ID=HOST:PORT of rank 0"):
        opened(kind).load(addition(kind, tmp_path, 2), rank=0, world=2)


@kinds
def test_a_tensor_of_another_runtime_is_refused(kind: str, opened: Opener, tmp_path: Path) -> None:
    runtime = opened(kind)
    model = runtime.load(addition(kind, tmp_path))
    inputs, outputs = allocated(runtime, model)
    inputs["x"] = Foreign()
    with pytest.raises(BadInput, match="'x' belongs to another runtime"):
        model.execute(inputs, outputs)


class Foreign:
    """A tensor of no known implementation."""

    name, core, nbytes = "x", 0, 16

    def write(self, array: Array) -> None: ...

    def read(self) -> Array:
        return X

    def free(self) -> None: ...


# Names


def info(name: str, nbytes: int = 16) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, nbytes)}


def test_names_are_matched_without_the_suffix_of_aliased_inputs() -> None:
    reported = info("x") | info("cache.must_alias_input")
    assert match({"x": 16, "cache": 16}, reported, "input") == {"x": "x", "cache": "cache.must_alias_input"}


def test_an_input_that_nothing_reads_and_an_output_of_0_bytes_may_be_absent() -> None:
    assert match({"x": 16, "unused": 4}, info("x"), "input") == {"x": "x"}
    assert match({"y": 16, "empty": 0}, info("y"), "output") == {"y": "y"}


@pytest.mark.parametrize(
    ("declared", "reported", "role", "reason"),
    [
        ({"x": 16}, info("x") | info("z"), "input", "'z' is not declared"),
        ({"x": 8}, info("x"), "input", "'x' has 16 bytes, and 8 are declared"),
        ({"y": 16, "z": 4}, info("y"), "output", "'z' is missing"),
        ({"x": 16}, info("x") | info("x.must_alias_input"), "input", "differ in the suffix"),
    ],
)
def test_every_other_difference_is_an_error(
    declared: dict[str, int], reported: dict[str, TensorInfo], role: str, reason: str
) -> None:
    with pytest.raises(InvalidLoad, match=f"^{role}s of the program are not those of its manifest: .*{reason}"):
        match(declared, reported, role)  # type: ignore[arg-type]


def test_every_error_is_one_of_the_compilers() -> None:
    assert issubclass(NoDevice, CompileError)
