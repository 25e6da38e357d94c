"""The stand-in library keeps AWS's documented rules, so that the tests of devices prove what they claim.

The product's signatures call it directly: each test is a row of the rules, and the wrapper's answer to it where the
documentation leaves more than one status open.
"""

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.run.devices import libnrt, open_runtime
from nxpipe.emulator.run.devices.faults import CollectiveFault, DeviceFailure, DeviceTimeout, NoDevice
from nxpipe.emulator.run.devices.libnrt import SIGNATURES, Library, MemoryStatsStruct
from nxpipe.emulator.run.status import (
    BadInput,
    CoreBusy,
    InvalidLoad,
    RuntimeClosed,
    RuntimeFault,
    Status,
    WrongGeneration,
)
from tests.runtime.devices import neff
from tests.runtime.devices.conftest import Machine, Opener
from tests.runtime.devices.programs import STATE, addition

pytestmark = pytest.mark.sample(2, "stand-in of libnrt")

INVALID, HANDLE, RESOURCE, TIMEOUT, HW_ERROR = 2, 3, 4, 5, 6
NOT_ENOUGH, VERSION, UNINITIALIZED, CLOSED = 9, 10, 13, 14
BAD_INPUT, BUSY, COLLECTIVES = 1002, 1005, 1200

Open = Callable[..., "Raw"]


class Raw:
    """The library with the shortest calls: handles in, statuses out."""

    def __init__(self, path: str) -> None:
        self.library = Library(path)

    def __call__(self, name: str, *arguments: Any) -> int:
        return self.library.status(name, *arguments)

    def init(self) -> int:
        return self("nrt_init", 1, b"test", b"1")

    def load(self, program: bytes, core: int = 0) -> tuple[int, c_void_p]:
        model = c_void_p()
        return self("nrt_load", program, len(program), core, 1, byref(model)), model

    def join(self, program: bytes, rank: int, world: int, core: int = 0) -> int:
        return self("nrt_load_collectives", program, len(program), core, 1, rank, world, byref(c_void_p()))

    def tensor(self, size: int = 16, core: int = 0, placement: int = 0) -> tuple[int, c_void_p]:
        tensor = c_void_p()
        return self("nrt_tensor_allocate", placement, core, size, b"t", byref(tensor)), tensor

    def set_of(self, **tensors: c_void_p) -> c_void_p:
        made = c_void_p()
        assert self("nrt_allocate_tensor_set", byref(made)) == 0
        for name, tensor in tensors.items():
            assert self("nrt_add_tensor_to_tensor_set", made, name.encode(), tensor) == 0
        return made

    def write(self, tensor: c_void_p, data: bytes, offset: int = 0) -> int:
        return self("nrt_tensor_write", tensor, data, offset, len(data))

    def read(self, tensor: c_void_p, size: int, offset: int = 0) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        assert self("nrt_tensor_read", tensor, ctypes.addressof(buffer), offset, size) == 0
        return buffer.raw

    def used(self, core: int = 0) -> int:
        return self.library.memory(core)[0]


@pytest.fixture
def raw(machine: Machine) -> Open:
    def open_library(*, init: bool = True, **settings: object) -> Raw:
        library = Raw(machine(**settings))
        assert not init or library.init() == 0
        return library

    return open_library


# The interface


def test_structures_have_the_sizes_of_the_headers(raw: Open) -> None:
    size = raw(init=False).library._library.standin_size
    size.argtypes, size.restype = (c_char_p,), c_size_t
    structures = {
        "tensor_info": libnrt.TensorInfoStruct,
        "version": libnrt.VersionStruct,
        "instance": libnrt.InstanceInfoStruct,
        "memory": libnrt.MemoryStatsStruct,
    }
    assert {name: ctypes.sizeof(kind) for name, kind in structures.items()} == {
        name: size(name.encode()) for name in structures
    }
    assert [size(b"tensor_info"), size(b"version"), size(b"instance")] == [296, 224, 32]


def test_every_function_with_a_signature_exists_and_no_other(raw: Open) -> None:
    library = raw(init=False).library._library
    assert [name for name in SIGNATURES if not hasattr(library, name)] == []
    assert not hasattr(library, "nrta_execute_schedule")
    assert not hasattr(library, "nrt_get_status_as_str")


def test_a_function_that_the_library_lacks_is_a_typed_error(raw: Open) -> None:
    with pytest.raises(DeviceFailure, match="libnrt has no function nrt_tensor_read_batch; install"):
        raw(init=False).library.call("nrt_tensor_read_batch")


# The order of calls


def test_calls_before_init_are_refused_but_the_total_of_cores_is_known(raw: Open) -> None:
    library = raw(init=False)
    assert library.load(neff.addition().to_bytes())[0] == library.tensor()[0] == UNINITIALIZED
    count = c_uint32()
    assert library("nrt_get_visible_vnc_count", byref(count)) == UNINITIALIZED
    assert library.library.count("nrt_get_total_vnc_count") == library.library.count("nrt_get_total_nc_count") == 2


@pytest.mark.parametrize(("status", "fault"), [(13, RuntimeClosed), (1, DeviceFailure)])
def test_the_wrapper_accepts_both_documented_statuses_of_a_call_before_init(
    status: int, fault: type[RuntimeFault], raw: Open
) -> None:
    with pytest.raises(fault):
        raw(init=False, early=status).library.call("nrt_get_visible_vnc_count", byref(c_uint32()))


def test_calls_after_close_and_a_second_init_are_refused(raw: Open) -> None:
    library = raw()
    assert library.init() == 1
    library("nrt_close")
    assert library.tensor()[0] == CLOSED
    assert library.init() == 1


def test_close_reports_objects_that_are_alive(raw: Open) -> None:
    library = raw()
    library.tensor()
    library("nrt_close")
    assert library.library._library.standin_violations() == 1


def test_a_tensor_outlives_the_sets_that_contain_it(raw: Open) -> None:
    library = raw()
    _, tensor = library.tensor()
    made = library.set_of(x=tensor)
    library("nrt_tensor_free", byref(tensor))
    assert library.library._library.standin_violations() == 1
    library("nrt_destroy_tensor_set", byref(made))


def test_without_a_device_init_is_invalid(raw: Open) -> None:
    assert raw(init=False, family="").init() == INVALID


# Programs


@pytest.mark.parametrize(
    ("damage", "status", "fault"),
    [
        (lambda data: data[:500], INVALID, InvalidLoad),
        (lambda data: bytes(8) + data[8:], INVALID, InvalidLoad),
        (lambda data: data[:8] + bytes(8) + data[16:], INVALID, InvalidLoad),
        (lambda data: data[:-1], INVALID, InvalidLoad),
        (lambda data: data[:16] + (512).to_bytes(8, "little") + data[24 : 1024 + 512], INVALID, InvalidLoad),
        (lambda data: neff.pack({"kelf-0.json": b"{}"}), INVALID, InvalidLoad),
        (lambda data: neff.addition(major=3).to_bytes(), VERSION, WrongGeneration),
        (lambda data: neff.addition(arch="trn2").to_bytes(), HW_ERROR, WrongGeneration),
        (lambda data: neff.addition(lnc=2).to_bytes(), INVALID, InvalidLoad),
    ],
    ids=["short", "package", "header size", "truncated", "truncated archive", "members", "major", "target", "lnc"],
)
def test_a_damaged_or_foreign_program_is_refused(
    damage: Callable[[bytes], bytes], status: int, fault: type[RuntimeFault], raw: Open, opened: Opener, tmp_path: Path
) -> None:
    data = damage(neff.addition().to_bytes())
    library = raw()
    assert (library.load(data)[0], library.used()) == (status, 0)
    (tmp_path / "program.neff").write_bytes(data)
    with pytest.raises(fault, match=r"^loading program\.neff as rank 0 of 1 failed with NRT_"):
        opened("libnrt").load(tmp_path / "program.neff")


def test_the_first_free_core_is_taken_until_none_is_left(raw: Open) -> None:
    library, data = raw(), neff.addition().to_bytes()
    models = [library.load(data, core=-1) for _ in range(3)]
    assert [status for status, _ in models] == [0, 0, NOT_ENOUGH]
    assert [library.used(core) > 0 for core in range(2)] == [True, True]
    assert library("nrt_unload", models[0][1]) == 0
    assert library("nrt_unload", models[0][1]) == HANDLE
    assert library.used(0) == 0


def test_tensor_infos_come_in_another_order_than_the_programs_with_the_types_of_the_runtime(raw: Open) -> None:
    program = neff.Neff(
        {"mask": (4,), "x": (4,), "w": (2, 2), "unused": (4,)},
        {"y": (4,), "empty": (0,)},
        ["add y x w"],
        dtypes={"mask": "pred", "unused": "float8_e4"},
    )
    library = raw()
    inputs, outputs = library.library.tensors(library.load(program.to_bytes())[1])
    assert list(inputs) != list(program.inputs)
    assert {name: (info.nbytes, info.dtype, info.shape) for name, info in inputs.items()} == {
        "mask": (4, "uint8", (4,)),
        "x": (16, "float32", (4,)),
        "w": (16, "float32", (2, 2)),
        "unused": (4, "int8", (4,)),
    }
    assert list(outputs) == ["y"]


def test_unused_inputs_and_types_may_be_missing_from_tensor_infos(raw: Open) -> None:
    program = neff.Neff({"x": (4,), "w": (4,), "unused": (4,)}, {"y": (4,)}, ["add y x w"]).to_bytes()
    dropped = raw(info="unused")
    assert sorted(dropped.library.tensors(dropped.load(program)[1])[0]) == ["w", "x"]
    untyped = raw(info="unknown")
    info = untyped.library.tensors(untyped.load(program)[1])[0]["x"]
    assert (info.nbytes, info.dtype, info.shape) == (16, None, None)


# Tensors


def test_tensors_of_0_bytes_of_other_memory_or_of_no_core_are_refused(raw: Open) -> None:
    library = raw()
    assert library.tensor(0)[0] == library.tensor(core=2)[0] == library.tensor(placement=2)[0] == INVALID


@pytest.mark.parametrize(("offset", "size"), [(0, 17), (16, 1), (8, 9), (2**63, 1), (1, 2**64 - 1)])
def test_a_range_beyond_the_tensor_is_refused(offset: int, size: int, raw: Open) -> None:
    library = raw()
    _, tensor = library.tensor(16)
    buffer = ctypes.create_string_buffer(32)
    for name in ("nrt_tensor_read", "nrt_tensor_write"):
        assert library(name, tensor, ctypes.addressof(buffer), offset, size) == INVALID
    assert library("nrt_tensor_memset", tensor, offset, 0, size) == INVALID
    assert library("nrt_tensor_copy", tensor, offset, tensor, 0, size) == INVALID
    assert library("nrt_tensor_allocate_slice", tensor, offset, size, b"", byref(c_void_p())) == INVALID


def test_parts_of_a_tensor_are_written_copied_and_filled(raw: Open) -> None:
    library = raw()
    _, tensor = library.tensor(8)
    assert library("nrt_tensor_memset", tensor, 0, 7, 8) == 0
    assert library.write(tensor, b"ab", 2) == 0
    assert library("nrt_tensor_copy", tensor, 2, tensor, 5, 2) == 0
    assert library.read(tensor, 8) == b"\7\7ab\7ab\7"
    assert library("nrt_tensor_get_size", tensor) == 8
    _, other = library.tensor(8, core=1)
    assert library("nrt_tensor_copy", tensor, 0, other, 0, 8) == INVALID


def test_a_slice_shares_bytes_with_its_source_and_survives_it(raw: Open) -> None:
    library = raw()
    _, tensor = library.tensor(8)
    part = c_void_p()
    assert library("nrt_tensor_allocate_slice", tensor, 4, 2, b"part", byref(part)) == 0
    library.write(tensor, b"abcdefgh")
    assert library.read(part, 2) == b"ef"
    library.write(part, b"XY")
    assert library.read(tensor, 8) == b"abcdXYgh"
    used = library.used()
    library("nrt_tensor_free", byref(tensor))
    assert (tensor.value, library.used(), library.read(part, 2)) == (None, used, b"XY")
    library("nrt_tensor_free", byref(part))
    assert library.used() == 0


def test_freed_handles_become_null_and_are_refused(raw: Open) -> None:
    library = raw()
    _, tensor = library.tensor()
    stale, made = c_void_p(tensor.value), library.set_of()
    library("nrt_tensor_free", byref(tensor))
    assert tensor.value is None
    assert library.write(stale, b"x") == library("nrt_add_tensor_to_tensor_set", made, b"x", stale) == HANDLE
    library("nrt_destroy_tensor_set", byref(made))
    assert made.value is None


def test_a_set_replaces_and_finds_tensors_by_name(raw: Open) -> None:
    library = raw()
    (_, one), (_, other), found = library.tensor(), library.tensor(), c_void_p(99)
    made = library.set_of(x=one)
    assert library("nrt_add_tensor_to_tensor_set", made, b"x", other) == 0
    assert library("nrt_get_tensor_from_tensor_set", made, b"y", byref(found)) == 1
    assert found.value == 99
    assert library("nrt_get_tensor_from_tensor_set", made, b"x", byref(found)) == 0
    assert found.value == other.value


def test_memory_counters_agree_with_the_limit(raw: Open) -> None:
    library = raw(hbm=1000)
    assert [library.tensor(600)[0], library.tensor(600)[0], library.tensor(600, core=1)[0]] == [0, RESOURCE, 0]
    assert library.library.memory(0) == (600, 1000)
    stats, written = MemoryStatsStruct(), c_size_t()
    assert library("nrt_get_vnc_memory_stats", 0, byref(stats), 8, byref(written)) == INVALID


# Execution


@pytest.mark.parametrize("status", [INVALID, BAD_INPUT])
@pytest.mark.parametrize("wrong", [["x"], ["x", "w", "z"], ["x", "short"]])
def test_a_wrong_binding_is_refused_with_either_documented_status(status: int, wrong: list[str], raw: Open) -> None:
    library = raw(bad_input=status)
    model, tensors = library.load(neff.addition().to_bytes())[1], {name: library.tensor()[1] for name in "xwzy"}
    inputs = {name: tensors[name] for name in wrong if name != "short"}
    if "short" in wrong:
        inputs["w"] = library.tensor(8)[1]
    sets = library.set_of(**inputs), library.set_of(y=tensors["y"])
    assert library("nrt_execute", model, *sets) == status
    with pytest.raises(BadInput if status == BAD_INPUT else InvalidLoad, match="executing m failed"):
        library.library.call("nrt_execute", model, *sets, doing="executing m")


def test_model_and_tensors_must_be_on_one_core(raw: Open) -> None:
    library = raw()
    model = library.load(neff.addition().to_bytes())[1]
    inputs = library.set_of(x=library.tensor()[1], w=library.tensor(core=1)[1])
    assert library("nrt_execute", model, inputs, library.set_of(y=library.tensor()[1])) == INVALID


def test_a_state_works_only_with_one_tensor_in_both_sets(raw: Open) -> None:
    program = neff.Neff({STATE: (4,), "x": (1,)}, {STATE: (4,)}, [f"update {STATE} x 8"]).to_bytes()
    library = raw()
    model, (_, state), (_, apart), (_, x) = library.load(program)[1], *(library.tensor(size) for size in (16, 16, 4))
    library.write(x, b"ABCD")
    for tensor in (state, apart):
        library.write(tensor, b"-" * 16)
    library.write(state, b"s" * 16)
    assert library("nrt_execute", model, library.set_of(total=state, x=x), library.set_of(total=apart)) == 0
    assert (library.read(state, 16), library.read(apart, 16)) == (b"s" * 16, b"-" * 8 + b"ABCD----")
    assert library("nrt_execute", model, library.set_of(total=state, x=x), library.set_of(total=state)) == 0
    assert library.read(state, 16) == b"ssssssssABCDssss"


@pytest.mark.parametrize("waits", [False, True])
def test_a_second_call_on_a_busy_core_is_refused_or_waits(waits: bool, opened: Opener, tmp_path: Path) -> None:
    runtime = opened("libnrt", busy="wait" if waits else "refuse")
    slow = neff.Neff({"x": (1,)}, {"y": (1,)}, ["sleep 300", "copy y x"]).write(tmp_path / "slow.neff")
    models = [runtime.load(slow) for _ in range(2)]
    bindings = [
        ({"x": runtime.allocate(4, name="x")}, {"y": runtime.allocate(4, name="y")}) for _ in models
    ]  # fmt: skip
    faults: list[RuntimeFault] = []
    start = threading.Barrier(2)

    def execute(number: int) -> None:
        start.wait()
        try:
            models[number].execute(*bindings[number])
        except RuntimeFault as fault:
            faults.append(fault)

    threads = [threading.Thread(target=execute, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(fault) for fault in faults] == ([] if waits else [CoreBusy])


def test_cores_run_at_the_same_time_in_threads_of_one_process(opened: Opener, tmp_path: Path, machine: Machine) -> None:
    runtime = opened("libnrt", NEURON_RT_ROOT_COMM_ID="127.0.0.1:61239")
    program, results = addition("libnrt", tmp_path, 2), [np.empty(0)] * 2

    def run(rank: int) -> None:
        model = runtime.load(program, core=rank, rank=rank, world=2)
        inputs = {name: runtime.allocate(16, core=rank, name=name) for name in "xw"}
        y = runtime.allocate(16, core=rank, name="y")
        inputs["x"].write(np.full(4, rank, np.float32))
        inputs["w"].write(np.ones(4, np.float32))
        model.execute(inputs, {"y": y})
        results[rank] = y.read().view(np.float32)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [list(result) for result in results] == [[3.0] * 4] * 2


# Ranks


def test_collectives_need_the_address_of_rank_0(raw: Open) -> None:
    assert raw().join(neff.addition(2).to_bytes(), 0, 2) == INVALID


@pytest.mark.parametrize(("status", "fault"), [(TIMEOUT, DeviceTimeout), (COLLECTIVES, CollectiveFault)])
def test_a_rank_without_its_peers_ends_with_either_documented_status(
    status: int, fault: type[RuntimeFault], opened: Opener, tmp_path: Path
) -> None:
    runtime = opened("libnrt", NEURON_RT_ROOT_COMM_ID="127.0.0.1:61239", timeout_ms=50, hang=status)
    used = runtime.counters().memory_used
    with pytest.raises(fault, match=r"loading addition\.neff as rank 1 of 2 failed"):
        runtime.load(addition("libnrt", tmp_path, 2), rank=1, world=2)
    assert runtime.counters().memory_used == used


def test_ranks_that_load_in_different_orders_do_not_meet(raw: Open) -> None:
    library = raw(NEURON_RT_ROOT_COMM_ID="127.0.0.1:61239", timeout_ms=100)
    programs = [neff.addition(2, scratch=scratch).to_bytes() for scratch in (1, 2)]
    statuses = [0, 0]

    def load(rank: int) -> None:
        statuses[rank] = library.join(programs[rank], rank, 2, core=rank)

    threads = [threading.Thread(target=load, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [TIMEOUT, TIMEOUT]


# The environment


@pytest.mark.parametrize("cores", ["0,2", "1,0", "3-2", "0-1,3", "0,0"])
def test_visible_cores_with_a_gap_are_refused_by_the_library_and_before_it(cores: str, raw: Open) -> None:
    settings = {"NEURON_RT_VISIBLE_CORES": cores, "cores": 4}
    library = raw(init=False, **settings)
    assert library.init() != 0
    with pytest.raises(InvalidLoad, match=f"NEURON_RT_VISIBLE_CORES is '{cores}'; list contiguous cores"):
        open_runtime("libnrt", library=library.library._library._name)


def test_cores_count_from_0_in_a_process(opened: Opener) -> None:
    runtime = opened("libnrt", NEURON_RT_VISIBLE_CORES="2-3", cores=4)
    assert runtime.description.cores == 2
    assert runtime.allocate(4, core=1).core == 1
    with pytest.raises(InvalidLoad):
        runtime.allocate(4, core=2)


def test_the_environment_counts_when_the_library_is_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Raw(machine(NEURON_RT_VISIBLE_CORES="1"))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    assert library.init() == 0
    assert library.library.count("nrt_get_visible_nc_count") == 1


def test_a_core_belongs_to_one_process(raw: Open, tmp_path: Path) -> None:
    first, second, third = (
        raw(init=False, folder=tmp_path, NEURON_RT_VISIBLE_CORES=cores) for cores in ("0", "0-1", "1")
    )
    assert [first.init(), second.init(), third.init()] == [0, NOT_ENOUGH, 0]


# Diagnosis


def test_a_profile_is_written_for_a_loaded_model(raw: Open, tmp_path: Path) -> None:
    library, path = raw(), str(tmp_path / "profile.ntff").encode()
    model = library.load(neff.addition().to_bytes())[1]
    assert library("nrt_profile_stop", path) == INVALID
    assert [library("nrt_profile_start", model, path), library("nrt_profile_stop", path)] == [0, 0]
    assert (tmp_path / "profile.ntff").read_bytes() == b"NTFF"


def test_ranks_meet_at_a_barrier(raw: Open) -> None:
    library = raw(NEURON_RT_ROOT_COMM_ID="127.0.0.1:61239", timeout_ms=5000)
    statuses = [1, 1]

    def wait(rank: int) -> None:
        statuses[rank] = library("nrt_barrier", rank, rank, 2)

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [0, 0]


@pytest.mark.parametrize("status", [status for status in Status if status])
def test_every_status_of_an_execution_is_an_error_with_that_status(
    status: Status, raw: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = raw().library
    monkeypatch.setenv("STANDIN_FAULT", f"nrt_execute={status.value}")
    with pytest.raises(RuntimeFault, match=rf"^executing m failed with {status.name} \({status.value}\): ") as raised:
        library.call("nrt_execute", None, None, None, doing="executing m")
    assert raised.value.status is status


def test_an_unknown_status_is_reported_with_its_number(raw: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FAULT", "nrt_execute=4711")
    with pytest.raises(DeviceFailure, match=r"failed with unknown status \(4711\)"):
        raw().library.call("nrt_execute", None, None, None, doing="executing m")


def test_a_failed_init_is_an_error_with_its_status(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FAULT", "nrt_init=6")
    with pytest.raises(RuntimeFault, match=r"opening the runtime failed with NRT_HW_ERROR \(6\)") as raised:
        open_runtime("libnrt", library=machine())
    assert not isinstance(raised.value, NoDevice)
