"""The runtime of devices on AWS's wheel `nrtpy`, by its documented interface.

Tensors are allocated as bytes, so that types that nrtpy reports as void or int8 do not matter. What nrtpy does not
offer (core counts, memory counters, the device's family) comes from the library that nrtpy has loaded, by ctypes.
"""

import gc
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.environment import require_collectives, require_visible_cores
from nxpipe.emulator.run.devices.faults import NO_DEVICE_FOUND, DeviceFailure, NoDevice, fault_of
from nxpipe.emulator.run.devices.libnrt import Library
from nxpipe.emulator.run.devices.protocol import (
    Binding,
    Clock,
    CoreCounters,
    DeviceDescription,
    DeviceTensor,
    ProcessRuntime,
    TensorInfo,
    Timing,
    open_program,
    require_binding,
    require_bytes,
    require_rank,
    require_runs,
    require_size,
)
from nxpipe.emulator.run.status import BadInput, RuntimeFault, Status, Unloaded

_STATUS: Final = re.compile(r"NRT_\w+\s*\((\d+)\)")


class NrtpyRuntime(ProcessRuntime):
    """The runtime of this process. nrtpy initialises the library with the first tensor, which is allocated here."""

    def __init__(self, library: str | None = None) -> None:
        require_visible_cores()
        self._nrtpy = _module()
        self.require_unopened(self._nrtpy)
        self._library_path = library
        self._tensors: list[NrtpyTensor] = []
        self._models: list[NrtpyModel] = []
        self.executions = Counter[int]()
        try:
            self.allocate(1, name="probe").free()
        except RuntimeFault as fault:
            if fault.status is Status.NRT_INVALID:
                raise NoDevice(NO_DEVICE_FOUND) from fault
            raise
        self.claim(self._nrtpy)

    @cached_property
    def _library(self) -> Library:
        return Library(self._library_path)

    @property
    def description(self) -> DeviceDescription:
        self.require_open()
        library = self._library
        cores = library.count("nrt_get_visible_vnc_count")
        return DeviceDescription("nrtpy", library.family(), cores, library.version())

    def load(self, program: Path, *, core: int = 0, rank: int = 0, world: int = 1) -> "NrtpyModel":
        self.require_open()
        require_rank(rank, world)
        if world > 1:
            require_collectives()
        open_program(program).close()  # nrtpy's error for a missing file has no reason
        with translated(f"loading {program.name} as rank {rank} of {world}", on_load=True):
            loaded = self._nrtpy.NrtpyModel.load_from_neff(
                program, name=program.stem, core_id=core, cc_enabled=world > 1, rank_id=rank, world_size=world
            )
        model = NrtpyModel(self, loaded, program.stem, core)
        self._models.append(model)
        return model

    def allocate(self, nbytes: int, *, core: int = 0, name: str = "") -> "NrtpyTensor":
        self.require_open()
        require_size(nbytes, name)
        with translated(f"allocating {nbytes:,} bytes for {name!r} on core {core}"):
            loaded = self._nrtpy.NrtpyTensor.from_numpy(np.zeros(nbytes, np.uint8), name=name or None, core_id=core)
        tensor = NrtpyTensor(self, loaded, name, core, nbytes)
        self._tensors.append(tensor)
        return tensor

    def counters(self, core: int = 0) -> CoreCounters:
        self.require_open()
        return CoreCounters(*self._library.memory(core), self.executions[core])

    def close(self) -> None:
        """Free all objects and reset nrtpy. A device that failed may refuse to free a tensor; reset drops it."""
        if not self._is_open:
            return
        for tensor in list(self._tensors):
            with suppress(RuntimeFault):
                tensor.free()
        for model in list(self._models):
            model.unload()
        self._is_open = False
        with translated("closing the runtime"):
            self._nrtpy.reset()

    def free(self, tensor: "NrtpyTensor", loaded: Any) -> None:
        self._tensors.remove(tensor)
        with translated(f"freeing tensor {tensor.name!r}"):
            self._nrtpy.get_nrtpy_singleton().free_tensor(loaded)

    def forget(self, model: "NrtpyModel") -> None:
        self._models.remove(model)

    @property
    def is_open(self) -> bool:
        return self._is_open


class NrtpyTensor:
    """A device tensor of bytes."""

    def __init__(self, runtime: NrtpyRuntime, loaded: Any, name: str, core: int, nbytes: int) -> None:
        self.name, self.core, self.nbytes = name, core, nbytes
        self._runtime, self._loaded = runtime, loaded

    @property
    def loaded(self) -> Any:
        self._runtime.require_open()
        if self._loaded is None:
            raise Unloaded(f"tensor {self.name!r} was freed; allocate it again")
        return self._loaded

    def write(self, array: Array) -> None:
        data = np.ascontiguousarray(array)
        require_bytes(self, data.nbytes)
        with translated(f"writing tensor {self.name!r}"):
            self.loaded.write_from_numpy(data.reshape(-1).view(np.uint8))

    def read(self) -> Array:
        with translated(f"reading tensor {self.name!r}"):
            return np.ascontiguousarray(self.loaded.numpy()).reshape(-1).view(np.uint8)

    def free(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None and self._runtime.is_open:
            self._runtime.free(self, loaded)


class NrtpyModel:
    """A loaded NEFF."""

    def __init__(self, runtime: NrtpyRuntime, loaded: Any, name: str, core: int) -> None:
        self.name, self.core = name, core
        self._runtime, self._loaded = runtime, loaded
        self.inputs = _infos(loaded.input_tensors_info)
        self.outputs = _infos(loaded.output_tensors_info)

    def execute(self, inputs: Binding, outputs: Binding) -> None:
        loaded = self._ready(inputs, outputs)
        with translated(f"executing {self.name} on core {self.core}"):
            loaded(inputs=_loaded(inputs), outputs=_loaded(outputs))
        self._runtime.executions[self.core] += 1

    def time(
        self, inputs: Binding, outputs: Binding, *, runs: int, warmup: int = 0, clock: Clock | None = None
    ) -> Timing:
        require_runs(runs, warmup)
        if clock == "predicted":
            raise BadInput(
                "nrtpy measures by the clocks of device and host, not by predicted time; leave the clock out"
            )
        loaded, mode = self._ready(inputs, outputs), clock or "host"
        with translated(f"timing {self.name} on core {self.core}"):
            result = loaded.benchmark(
                inputs=_loaded(inputs),
                outputs=_loaded(outputs),
                warmup_iter=warmup,
                benchmark_iter=runs,
                mode=mode,
            )
        self._runtime.executions[self.core] += warmup + runs
        return Timing(mode, tuple(result.durations_ms))

    def unload(self) -> None:
        """nrtpy unloads a model when it is garbage collected."""
        if self._loaded is not None:
            self._loaded = None
            self._runtime.forget(self)
            gc.collect()

    def _ready(self, inputs: Binding, outputs: Binding) -> Any:
        self._runtime.require_open()
        if self._loaded is None:
            raise Unloaded(f"{self.name} was unloaded; load it again")
        require_binding(self, inputs, outputs)
        return self._loaded


def _loaded(binding: Binding) -> dict[str, Any]:
    return {name: _nrtpy_tensor(tensor) for name, tensor in binding.items()}


def _nrtpy_tensor(tensor: DeviceTensor) -> Any:
    if not isinstance(tensor, NrtpyTensor):
        raise BadInput(f"tensor {tensor.name!r} belongs to another runtime; allocate it in this one")
    return tensor.loaded


def _infos(metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, int(info.size), None, tuple(info.shape)) for name, info in metadata.items()}


def _module() -> Any:
    try:
        return importlib.import_module("nrtpy")
    except ImportError as fault:
        raise NoDevice(
            f"no Neuron device: nrtpy cannot be imported ({fault}); install the wheel nrtpy and "
            "aws-neuronx-runtime-lib, and add /opt/aws/neuron/lib to LD_LIBRARY_PATH"
        ) from fault


@contextmanager
def translated(doing: str, *, on_load: bool = False) -> Iterator[None]:
    """Raise nrtpy's errors, which are RuntimeErrors with the status in their message, as errors with that status."""
    try:
        yield
    except RuntimeError as fault:
        status = _STATUS.search(str(fault))
        if status:
            raise fault_of(int(status.group(1)), doing, on_load=on_load) from fault
        raise DeviceFailure(f"{doing} failed: {fault}") from fault
