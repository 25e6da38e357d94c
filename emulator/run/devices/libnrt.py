"""`libnrt.so.1` by ctypes: signatures, structures, and calls whose status becomes a typed error.

Transcribed from AWS's public headers (SDK 2.32). The asynchronous interface is left out: its signatures changed.
Calls release the interpreter's lock. The library reads its environment when it is loaded.
"""

import ctypes
from collections.abc import Iterator, Mapping
from ctypes import POINTER, Structure, c_char, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Final

from nxpipe.emulator.run.devices.faults import DeviceFailure, NoDevice, fault_of
from nxpipe.emulator.run.devices.protocol import TensorInfo

NAMES: Final = ("libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1")

DEVICE_MEMORY: Final = 0  # nrt_tensor_placement_t
NO_FRAMEWORK: Final = 1  # nrt_framework_type_t
INPUT, OUTPUT = 0, 1  # nrt_tensor_usage_t
# nrt_dtype_t. AWS's developer guide prints another, older numbering.
DTYPES: Final = (
    *("unknown", "uint64", "int8", "uint8", "int16", "uint16", "bfloat16", "float16", "int32", "uint32", "float32"),
    *("fp32r", "int64", "float8_e3", "float8_e4", "float8_e5"),
)
FAMILIES: Final = (
    *("unknown", "inf1", "trn1", "trn1n", "inf2", "trn2", "trn2n", "inf2e", "trn2p", "trn2u", "trn2e", "trn2eu"),
    *("trn2ac", "trn2uac", "trn3", "trn3pds98"),
)


class TensorInfoStruct(Structure):
    """nrt_tensor_info_t, 296 bytes."""

    _fields_ = (
        ("name", c_char * 256),
        ("usage", c_int),
        ("size", c_size_t),
        ("dtype", c_int),
        ("shape", POINTER(c_uint32)),
        ("ndim", c_uint32),
    )


class TensorInfoArray(Structure):
    """nrt_tensor_info_array_t: the count, followed by the tensors."""

    _fields_ = (("tensor_count", c_uint64),)


class VersionStruct(Structure):
    """nrt_version_t, 224 bytes."""

    _fields_ = (
        ("major", c_uint64),
        ("minor", c_uint64),
        ("patch", c_uint64),
        ("maintenance", c_uint64),
        ("rt_detail", c_char * 128),
        ("git_hash", c_char * 64),
    )


class InstanceInfoStruct(Structure):
    """nrt_instance_info_t, 32 bytes."""

    _fields_ = (
        ("family", c_uint32),
        ("size", c_uint32),
        ("arch_name", c_char * 16),
        ("device_revision", c_char * 8),
    )


class MemoryStatsStruct(Structure):
    """nrt_vnc_memory_stats_t, 16 bytes."""

    _fields_ = (("bytes_used", c_size_t), ("bytes_limit", c_size_t))


_HANDLE: Final = c_void_p  # nrt_model_t *, nrt_tensor_t *, nrt_tensor_set_t *
_TO_HANDLE: Final = POINTER(c_void_p)
_COUNT: Final = POINTER(c_uint32)

# Parameters of each function; all return NRT_STATUS but those in _RESULTS.
SIGNATURES: Final[Mapping[str, tuple[Any, ...]]] = {
    "nrt_init": (c_int, c_char_p, c_char_p),
    "nrt_close": (),
    "nrt_load": (c_void_p, c_size_t, c_int32, c_int32, _TO_HANDLE),
    "nrt_load_collectives": (c_void_p, c_size_t, c_int32, c_int32, c_uint32, c_uint32, _TO_HANDLE),
    "nrt_unload": (_HANDLE,),
    "nrt_get_model_tensor_info": (_HANDLE, POINTER(POINTER(TensorInfoArray))),
    "nrt_free_model_tensor_info": (POINTER(TensorInfoArray),),
    "nrt_allocate_tensor_set": (_TO_HANDLE,),
    "nrt_destroy_tensor_set": (_TO_HANDLE,),
    "nrt_add_tensor_to_tensor_set": (_HANDLE, c_char_p, _HANDLE),
    "nrt_get_tensor_from_tensor_set": (_HANDLE, c_char_p, _TO_HANDLE),
    "nrt_execute": (_HANDLE, _HANDLE, _HANDLE),
    "nrt_tensor_allocate": (c_int, c_int, c_size_t, c_char_p, _TO_HANDLE),
    "nrt_tensor_allocate_slice": (_HANDLE, c_size_t, c_size_t, c_char_p, _TO_HANDLE),
    "nrt_tensor_free": (_TO_HANDLE,),
    "nrt_tensor_read": (_HANDLE, c_void_p, c_size_t, c_size_t),
    "nrt_tensor_write": (_HANDLE, c_void_p, c_size_t, c_size_t),
    "nrt_tensor_copy": (_HANDLE, c_size_t, _HANDLE, c_size_t, c_size_t),
    "nrt_tensor_memset": (_HANDLE, c_uint64, c_int, c_size_t),
    "nrt_tensor_get_size": (_HANDLE,),
    "nrt_get_total_nc_count": (_COUNT,),
    "nrt_get_visible_nc_count": (_COUNT,),
    "nrt_get_total_vnc_count": (_COUNT,),
    "nrt_get_visible_vnc_count": (_COUNT,),
    "nrt_get_version": (POINTER(VersionStruct), c_size_t),
    "nrt_get_instance_info": (POINTER(InstanceInfoStruct), c_size_t),
    "nrt_get_vnc_memory_stats": (c_uint32, POINTER(MemoryStatsStruct), c_size_t, POINTER(c_size_t)),
    "nrt_profile_start": (_HANDLE, c_char_p),
    "nrt_profile_stop": (c_char_p,),
    "nrt_barrier": (c_int32, c_uint32, c_uint32),
}
_RESULTS: Final[Mapping[str, Any]] = {
    "nrt_close": None,
    "nrt_destroy_tensor_set": None,
    "nrt_tensor_free": None,
    "nrt_tensor_get_size": c_size_t,
}


class Library:
    """The loaded library. Functions are looked up when they are called: an older library lacks some."""

    def __init__(self, path: str | None = None) -> None:
        self._library = _loaded(path)
        self.identity = self._library._handle

    def call(self, name: str, *arguments: Any, doing: str = "", on_load: bool = False) -> None:
        """Call a function that returns a status; raises the status's error unless it is 0."""
        status = self.status(name, *arguments)
        if status:
            raise fault_of(status, doing or name, on_load=on_load)

    def status(self, name: str, *arguments: Any) -> int:
        """The result of a function: a status, a size, or 0 for a function without one."""
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceFailure(f"libnrt has no function {name}; install aws-neuronx-runtime-lib of SDK 2.32 or later")
        function.argtypes = SIGNATURES[name]
        function.restype = _RESULTS.get(name, c_int)
        result = function(*arguments)
        return 0 if result is None else int(result)

    def count(self, name: str) -> int:
        number = c_uint32()
        self.call(name, ctypes.byref(number))
        return number.value

    def version(self) -> str:
        version = VersionStruct()
        self.call("nrt_get_version", ctypes.byref(version), ctypes.sizeof(version))
        return f"{version.major}.{version.minor}.{version.patch}.{version.maintenance}"

    def family(self) -> str:
        """The family of the instance, such as trn1; "unknown" for one that this table lacks."""
        info = InstanceInfoStruct()
        self.call("nrt_get_instance_info", ctypes.byref(info), ctypes.sizeof(info))
        return FAMILIES[info.family] if info.family < len(FAMILIES) else FAMILIES[0]

    def memory(self, core: int) -> tuple[int, int]:
        """Bytes used and available on a core."""
        stats, size = MemoryStatsStruct(), c_size_t()
        self.call(
            "nrt_get_vnc_memory_stats", core, ctypes.byref(stats), ctypes.sizeof(stats), ctypes.byref(size),
            doing=f"reading the memory counters of core {core}",
        )  # fmt: skip
        return stats.bytes_used, stats.bytes_limit

    def tensors(self, model: c_void_p) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
        """Inputs and outputs of a model, by name."""
        array = POINTER(TensorInfoArray)()
        self.call("nrt_get_model_tensor_info", model, ctypes.byref(array))
        try:
            found: tuple[dict[str, TensorInfo], dict[str, TensorInfo]] = ({}, {})
            for entry in _entries(array):
                info = _info(entry)
                found[entry.usage == OUTPUT][info.name] = info
            return found
        finally:
            self.status("nrt_free_model_tensor_info", array)


def _loaded(path: str | None) -> ctypes.CDLL:
    for name in (path,) if path else NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError as fault:
            reason = str(fault)
    raise NoDevice(
        f"no Neuron device: the runtime's library cannot be loaded ({reason}); install aws-neuronx-runtime-lib, and "
        "add /opt/aws/neuron/lib to LD_LIBRARY_PATH"
    )


def _entries(array: Any) -> Iterator[TensorInfoStruct]:
    count = array.contents.tensor_count
    start = ctypes.addressof(array.contents) + ctypes.sizeof(TensorInfoArray)
    yield from (TensorInfoStruct * count).from_address(start)


def _info(entry: TensorInfoStruct) -> TensorInfo:
    dtype = DTYPES[entry.dtype] if 0 < entry.dtype < len(DTYPES) else None
    shape = tuple(entry.shape[axis] for axis in range(entry.ndim)) if entry.shape else None
    return TensorInfo(entry.name.decode(), entry.size, dtype, shape)
