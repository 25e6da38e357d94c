"""The runtime of devices on `libnrt.so.1`, by ctypes."""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Final

import numpy as np

from nxpipe.emulator.numerics import Array
from nxpipe.emulator.run.devices.environment import require_collectives, require_visible_cores
from nxpipe.emulator.run.devices.faults import NO_DEVICE_FOUND, NoDevice
from nxpipe.emulator.run.devices.libnrt import DEVICE_MEMORY, NO_FRAMEWORK, Library
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

_ONE_CORE: Final = 1  # the deprecated number of cores of a model


class LibnrtRuntime(ProcessRuntime):
    """The runtime of this process. May be used by several threads, each for cores of its own."""

    def __init__(self, library: str | None = None) -> None:
        require_visible_cores()
        self.library = Library(library)
        self.require_unopened(self.library.identity)
        status = self.library.status("nrt_init", NO_FRAMEWORK, b"nxpipe", b"1.0")
        if status == Status.NRT_INVALID:
            raise NoDevice(NO_DEVICE_FOUND)
        if status:
            self.library.call("nrt_init", NO_FRAMEWORK, b"nxpipe", b"1.0", doing="opening the runtime")
        self.claim(self.library.identity)
        self._tensors: list[LibnrtTensor] = []
        self.models: list[LibnrtModel] = []
        self.executions = Counter[int]()

    @property
    def description(self) -> DeviceDescription:
        self.require_open()
        cores = self.library.count("nrt_get_visible_vnc_count")
        return DeviceDescription("libnrt", self.library.family(), cores, self.library.version())

    def load(self, program: Path, *, core: int = 0, rank: int = 0, world: int = 1) -> "LibnrtModel":
        self.require_open()
        require_rank(rank, world)
        with open_program(program) as file:
            neff = file.read()
        doing = f"loading {program.name} as rank {rank} of {world}"
        handle = c_void_p()
        arguments = (neff, len(neff), core, _ONE_CORE)
        if world == 1:
            self.library.call("nrt_load", *arguments, byref(handle), doing=doing, on_load=True)
        else:
            require_collectives()
            self.library.call("nrt_load_collectives", *arguments, rank, world, byref(handle), doing=doing, on_load=True)
        try:
            model = LibnrtModel(self, handle, program.stem, core)
        except RuntimeFault:
            self.library.status("nrt_unload", handle)
            raise
        self.models.append(model)
        return model

    def allocate(self, nbytes: int, *, core: int = 0, name: str = "") -> "LibnrtTensor":
        self.require_open()
        require_size(nbytes, name)
        handle = c_void_p()
        self.library.call(
            "nrt_tensor_allocate", DEVICE_MEMORY, core, nbytes, name.encode(), byref(handle),
            doing=f"allocating {nbytes:,} bytes for {name!r} on core {core}",
        )  # fmt: skip
        tensor = LibnrtTensor(self, handle, name, core, nbytes)
        self._tensors.append(tensor)
        return tensor

    def counters(self, core: int = 0) -> CoreCounters:
        self.require_open()
        return CoreCounters(*self.library.memory(core), self.executions[core])

    def close(self) -> None:
        """Free all objects in the order that the library requires: sets, tensors, models, the runtime. A device that
        failed may refuse; its runtime is closed nevertheless, so that the first error remains."""
        if not self._is_open:
            return
        for model in list(self.models):
            model.unbind()
        for tensor in list(self._tensors):
            tensor.free()
        for model in list(self.models):
            with suppress(RuntimeFault):
                model.unload()
        self._is_open = False
        self.library.status("nrt_close")

    def forget(self, tensor: "LibnrtTensor") -> None:
        """Unbind a tensor that is about to be freed: a tensor must outlive the sets that contain it."""
        for model in list(self.models):
            model.unbind(tensor)
        self._tensors.remove(tensor)


class LibnrtTensor:
    """A device tensor."""

    def __init__(self, runtime: LibnrtRuntime, handle: c_void_p, name: str, core: int, nbytes: int) -> None:
        self.name, self.core, self.nbytes = name, core, nbytes
        self._runtime, self._handle = runtime, handle

    @property
    def handle(self) -> c_void_p:
        self._runtime.require_open()
        if not self._handle:
            raise Unloaded(f"tensor {self.name!r} was freed; allocate it again")
        return self._handle

    def write(self, array: Array) -> None:
        data = np.ascontiguousarray(array)
        require_bytes(self, data.nbytes)
        self._runtime.library.call(
            "nrt_tensor_write", self.handle, data.ctypes.data, 0, data.nbytes, doing=f"writing tensor {self.name!r}"
        )

    def read(self) -> Array:
        data = np.empty(self.nbytes, np.uint8)
        self._runtime.library.call(
            "nrt_tensor_read", self.handle, data.ctypes.data, 0, data.nbytes, doing=f"reading tensor {self.name!r}"
        )
        return data

    def free(self) -> None:
        if self._handle and self._runtime._is_open:
            self._runtime.forget(self)
            self._runtime.library.status("nrt_tensor_free", byref(self._handle))
        self._handle = c_void_p()


class _TensorSet:
    """Tensors by name, as the library takes them."""

    def __init__(self, library: Library, binding: Binding) -> None:
        self._library, self.handle = library, c_void_p()
        self.tensors = dict(binding)
        handles = {name: handle_of(tensor) for name, tensor in binding.items()}
        library.call("nrt_allocate_tensor_set", byref(self.handle), doing="allocating a tensor set")
        try:
            for name, handle in handles.items():
                library.call(
                    "nrt_add_tensor_to_tensor_set", self.handle, name.encode(), handle, doing=f"binding tensor {name!r}"
                )
        except RuntimeFault:
            self.destroy()
            raise

    def holds(self, binding: Binding) -> bool:
        return self.tensors.keys() == binding.keys() and all(
            self.tensors[name] is tensor for name, tensor in binding.items()
        )

    def destroy(self) -> None:
        self._library.status("nrt_destroy_tensor_set", byref(self.handle))


def handle_of(tensor: DeviceTensor) -> c_void_p:
    if not isinstance(tensor, LibnrtTensor):
        raise BadInput(f"tensor {tensor.name!r} belongs to another runtime; allocate it in this one")
    return tensor.handle


class LibnrtModel:
    """A loaded NEFF. The tensor sets of the last binding are kept, so that a repeated call builds none."""

    def __init__(self, runtime: LibnrtRuntime, handle: c_void_p, name: str, core: int) -> None:
        self.name, self.core = name, core
        self._runtime, self._handle = runtime, handle
        self._sets: tuple[_TensorSet, _TensorSet] | None = None
        self.inputs: Mapping[str, TensorInfo]
        self.outputs: Mapping[str, TensorInfo]
        self.inputs, self.outputs = runtime.library.tensors(handle)

    def execute(self, inputs: Binding, outputs: Binding) -> None:
        self._runtime.require_open()
        if not self._handle:
            raise Unloaded(f"{self.name} was unloaded; load it again")
        require_binding(self, inputs, outputs)
        taken, given = self._bound(inputs, outputs)
        self._runtime.library.call(
            "nrt_execute", self._handle, taken.handle, given.handle, doing=f"executing {self.name} on core {self.core}"
        )
        self._runtime.executions[self.core] += 1

    def time(
        self, inputs: Binding, outputs: Binding, *, runs: int, warmup: int = 0, clock: Clock | None = None
    ) -> Timing:
        if clock not in (None, "host"):
            raise BadInput(f"libnrt measures by the clock of the host, not by {clock}; leave the clock out")
        require_runs(runs, warmup)
        durations = []
        for _ in range(warmup + runs):
            start = time.perf_counter()
            self.execute(inputs, outputs)
            durations.append((time.perf_counter() - start) * 1e3)
        return Timing("host", tuple(durations[warmup:]))

    def unbind(self, tensor: LibnrtTensor | None = None) -> None:
        """Destroy the tensor sets, if they contain the tensor."""
        if self._sets and (tensor is None or any(tensor in bound.tensors.values() for bound in self._sets)):
            for bound in self._sets:
                bound.destroy()
            self._sets = None

    def unload(self) -> None:
        if self._handle and self._runtime._is_open:
            self.unbind()
            self._runtime.models.remove(self)
            handle, self._handle = self._handle, c_void_p()
            self._runtime.library.call("nrt_unload", handle, doing=f"unloading {self.name}")

    def _bound(self, inputs: Binding, outputs: Binding) -> tuple[_TensorSet, _TensorSet]:
        if not self._sets or not (self._sets[0].holds(inputs) and self._sets[1].holds(outputs)):
            self.unbind()
            taken = _TensorSet(self._runtime.library, inputs)
            try:
                self._sets = (taken, _TensorSet(self._runtime.library, outputs))
            except RuntimeFault:
                taken.destroy()
                raise
        return self._sets
