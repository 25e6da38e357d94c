"""A stand-in for AWS's wheel `nrtpy` that refuses whatever its documentation does not allow.

It is imported as `nrtpy` (`tests/runtime/devices/conftest.py`) and drives the stand-in library of this folder.
Names, parameters, defaults and errors are those of the pages neuron-runtime/nrtpy/*.rst of SDK 2.32. What the pages
leave open is strict here: no attribute beyond the documented ones, no other argument types, and one thread.
"""

import os
import threading
import time
from collections.abc import Iterable
from ctypes import byref, c_void_p
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nxpipe.emulator.run.devices.faults import NoDevice
from nxpipe.emulator.run.devices.libnrt import SIGNATURES, Library

__all__ = ["NrtError", "NrtpyError", "NrtpyModel", "NrtpyTensor", "configure", "get_nrtpy_singleton", "reset"]

try:
    Library(os.environ.get("STANDIN_LIBRARY"))
except NoDevice as missing:
    raise ImportError("libnrt.so.1: cannot open shared object file") from missing

_NAMES = {
    1: "NRT_FAILURE",
    2: "NRT_INVALID",
    4: "NRT_RESOURCE",
    5: "NRT_TIMEOUT",
    6: "NRT_FAILURE",
    10: "NRT_UNSUPPORTED",
}


class NrtpyError(RuntimeError):
    """An error of the Python layer, such as the use of a freed tensor."""


class NrtError(RuntimeError):
    """A status of the library; the message has its name and number."""


class _Singleton:
    """The runtime of the process, created by the first operation."""

    current: "_Singleton | None" = None

    def __init__(self) -> None:
        self.library = Library(os.environ.get("STANDIN_LIBRARY"))
        self.thread = threading.get_ident()
        self.generation = object()
        self.check(self.library.status("nrt_init", 1, b"nrtpy", b"1.0"), "Failed to initialize NRT runtime")

    @classmethod
    def get(cls) -> "_Singleton":
        if cls.current is None:
            cls.current = cls()
        if threading.get_ident() != cls.current.thread:
            raise NrtpyError("the stand-in allows one thread")
        return cls.current

    def call(self, name: str, *arguments: Any, text: str) -> None:
        assert name in SIGNATURES
        self.check(self.library.status(name, *arguments), text)

    def check(self, status: int, text: str) -> None:
        if status:
            raise NrtError(f"NRT Error {_NAMES.get(status, 'NRT_STATUS')}({status}): {text}")

    def free_tensor(self, tensor: "NrtpyTensor") -> None:
        if not isinstance(tensor, NrtpyTensor):
            raise TypeError("free_tensor takes a tensor")
        tensor._release()


def get_nrtpy_singleton() -> _Singleton:
    return _Singleton.get()


def configure(visible_cores: Iterable[int] | None = None) -> None:
    if _Singleton.current is not None:
        raise NrtpyError("the runtime is active; call reset() first")
    if isinstance(visible_cores, int):
        raise TypeError("visible_cores is an iterable of integers")
    if visible_cores is not None:
        cores = list(visible_cores)
        if not all(isinstance(core, int) for core in cores):
            raise TypeError("visible_cores has a value that is not an integer")
        if any(core < 0 for core in cores):
            raise ValueError("a core is negative")
        os.environ["NEURON_RT_VISIBLE_CORES"] = ",".join(map(str, cores))


def reset() -> None:
    if _Singleton.current is not None:
        _Singleton.current.library.status("nrt_close")
        _Singleton.current = None


class NrtpyTensor:
    """A tensor in device memory."""

    def __init__(self, tensor_ref: c_void_p, shape: tuple[int, ...] | int, dtype: Any, name: str | None = None) -> None:
        self._owner, self._ref = _Singleton.get(), tensor_ref
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype, self.name = np.dtype(dtype), name or ""

    @classmethod
    def from_numpy(cls, array: Any, name: str | None = None, core_id: int = 0) -> "NrtpyTensor":
        if not isinstance(array, np.ndarray) or not isinstance(core_id, int) or not isinstance(name, str | None):
            raise TypeError("from_numpy takes an array, a name and a core")
        owner, ref, data = _Singleton.get(), c_void_p(), np.ascontiguousarray(array)
        text = None if name is None else name.encode()
        owner.call("nrt_tensor_allocate", 0, core_id, data.nbytes, text, byref(ref), text="Failed to allocate tensor")
        tensor = cls(ref, array.shape, array.dtype, name)
        tensor.write_from_numpy(data)
        return tensor

    def write_from_numpy(self, array: Any) -> None:
        data = np.ascontiguousarray(array)
        if data.nbytes != self._nbytes:
            raise ValueError("the array's byte size is not the tensor's")
        self._owner.call("nrt_tensor_write", self._live, data.ctypes.data, 0, data.nbytes, text="Failed to write")

    def numpy(self) -> Any:
        data = np.empty(self.shape, self.dtype)
        self._owner.call("nrt_tensor_read", self._live, data.ctypes.data, 0, data.nbytes, text="Failed to read")
        return data

    @property
    def _nbytes(self) -> int:
        return prod(self.shape) * int(self.dtype.itemsize)

    @property
    def _live(self) -> c_void_p:
        if _Singleton.get() is not self._owner:
            raise NrtpyError("the tensor is of a runtime that was reset")
        if not self._ref:
            raise NrtpyError("the tensor was freed")
        return self._ref

    def _release(self) -> None:
        self._owner.library.status("nrt_tensor_free", byref(self._live))

    def __del__(self) -> None:
        if _Singleton.current is self._owner and self._ref:
            self._release()


class NrtpyModel:
    """A loaded NEFF."""

    def __init__(self, owner: _Singleton, handle: c_void_p, path: Path, core: int) -> None:
        self._owner, self._handle, self._path, self._core = owner, handle, path, core
        self.input_tensors_info, self.output_tensors_info = (
            {
                name: SimpleNamespace(shape=info.shape or (info.nbytes,), size=info.nbytes)
                for name, info in infos.items()
            }
            for infos in owner.library.tensors(handle)
        )

    @classmethod
    def load_from_neff(
        cls,
        neff_path: Path | str,
        name: str | None = None,
        core_id: int = 0,
        cc_enabled: bool = False,
        rank_id: int = 0,
        world_size: int = 1,
    ) -> "NrtpyModel":
        numbers = (core_id, rank_id, world_size)
        if not isinstance(neff_path, Path | str) or not all(type(number) is int for number in numbers):
            raise TypeError("load_from_neff takes a path and integers")
        if type(cc_enabled) is not bool or not isinstance(name, str | None):
            raise TypeError("cc_enabled is a bool, name a text")
        if world_size > 1 and not cc_enabled:
            raise NrtpyError("several ranks need cc_enabled")
        path, owner, handle = Path(neff_path), _Singleton.get(), c_void_p()
        if not path.exists():
            raise NrtError("NRT Error NRT_FAILURE(1): Failed to load model")
        data = path.read_bytes()
        start = (data, len(data), core_id, 1)
        if cc_enabled:
            arguments = (*start, rank_id, world_size, byref(handle))
            owner.call("nrt_load_collectives", *arguments, text="Failed to load model")
        else:
            owner.call("nrt_load", *start, byref(handle), text="Failed to load model")
        return cls(owner, handle, path, core_id)

    def __call__(
        self, inputs: Any, outputs: Any = None, save_trace: bool = False, ntff_name: str | None = None
    ) -> dict[str, NrtpyTensor] | None:
        if _Singleton.get() is not self._owner:
            raise NrtpyError("the model is of a runtime that was reset")
        _require_tensors(inputs)
        made = None
        if outputs is None:
            made = outputs = {
                name: NrtpyTensor.from_numpy(np.zeros(info.shape, f"V{info.size // max(prod(info.shape), 1)}"))
                for name, info in self.output_tensors_info.items()
            }
        _require_tensors(outputs)
        sets = [self._set(inputs), self._set(outputs)]
        try:
            self._owner.call("nrt_execute", self._handle, *sets, text="Failed to execute model")
        finally:
            for bound in sets:
                self._owner.library.status("nrt_destroy_tensor_set", byref(bound))
        return made

    def benchmark(
        self, inputs: Any, outputs: Any = None, warmup_iter: int = 5, benchmark_iter: int = 5, mode: str = "device"
    ) -> SimpleNamespace:
        if mode not in ("device", "host") or benchmark_iter < 1:
            raise ValueError("mode is device or host, and at least one iteration is timed")
        if mode == "device" and os.environ.get("STANDIN_TRACE") == "none":
            raise RuntimeError("no device execution events were captured")
        durations = []
        for _ in range(warmup_iter + benchmark_iter):
            start = time.perf_counter()
            self(inputs, outputs)
            durations.append((time.perf_counter() - start) * 1e3)
        kept = durations[warmup_iter:]
        return SimpleNamespace(
            mean_ms=float(np.mean(kept)),
            min_ms=min(kept),
            max_ms=max(kept),
            std_dev_ms=float(np.std(kept)),
            iterations=len(kept),
            warmup_iterations=warmup_iter,
            durations_ms=kept,
        )

    def _set(self, tensors: dict[str, NrtpyTensor]) -> c_void_p:
        made = c_void_p()
        self._owner.call("nrt_allocate_tensor_set", byref(made), text="Failed to allocate tensor set")
        for name, tensor in tensors.items():
            arguments = (made, name.encode(), tensor._live)
            self._owner.call("nrt_add_tensor_to_tensor_set", *arguments, text="Failed to add tensor")
        return made

    def __del__(self) -> None:
        if _Singleton.current is self._owner and self._handle:
            self._owner.library.status("nrt_unload", self._handle)


def _require_tensors(tensors: Any) -> None:
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, NrtpyTensor) for name, tensor in tensors.items()
    ):
        raise TypeError("inputs and outputs are dictionaries of names and tensors")
