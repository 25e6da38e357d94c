"""Element types and tensor types of the graph."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np

# Limits on the work for hostile graphs; no real model reaches them.
_MAX_RANK = 16
_MAX_ELEMENTS = 2**48


class DType(StrEnum):
    """An element type. Values of every float type are stored as float32 arrays during emulation (see numerics)."""

    FLOAT32 = "float32"
    TFLOAT32 = "tfloat32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E4M3 = "float8_e4m3"  # the variant of Inferentia2 and Trainium: finite up to 240
    FLOAT8_E4M3FN = "float8_e4m3fn"  # the variant of the Open Compute Project: finite up to 448, no infinity
    UINT64 = "uint64"
    UINT32 = "uint32"
    UINT16 = "uint16"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    UINT8 = "uint8"
    BOOL = "bool"

    __hash__ = str.__hash__  # that of Enum is a function in Python, and types are keys everywhere

    @property
    def is_float(self) -> bool:
        return self in _FLOAT_WIDTHS

    @property
    def is_integer(self) -> bool:
        return not self.is_float and self is not DType.BOOL

    @property
    def itemsize(self) -> int:
        """Bytes of an element in memory (tfloat32 is stored as a float32 word)."""
        return _WIDTHS[self]

    @property
    def held(self) -> np.dtype[np.generic]:
        """The numpy type that holds values of this type during emulation."""
        return np.dtype(np.float32) if self.is_float else np.dtype(self.value)

    @property
    def stored(self) -> np.dtype[Any]:
        """The numpy type of an element in memory; the narrow floats come from ml_dtypes."""
        if self is DType.TFLOAT32:
            return np.dtype(np.float32)
        return np.dtype(getattr(ml_dtypes, self.value, self.value))

    @property
    def on_device(self) -> "DType":
        """The type on the device, which has no 64-bit integers and stores booleans as bytes."""
        return _ON_DEVICE.get(self, self)

    @property
    def short(self) -> str:
        """The short name in printed graphs: f32, bf16, f8_e4m3, i64, bool."""
        return self.value.replace("bfloat", "bf").replace("tfloat", "tf").replace("float", "f").replace("int", "i")


_ON_DEVICE = {DType.INT64: DType.INT32, DType.UINT64: DType.UINT32, DType.BOOL: DType.UINT8}
_UNSIGNED = {DType.UINT64, DType.UINT32, DType.UINT16, DType.UINT8}
_FLOAT_WIDTHS = {
    DType.FLOAT32: 4,
    DType.TFLOAT32: 4,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT8_E5M2: 1,
    DType.FLOAT8_E4M3: 1,
    DType.FLOAT8_E4M3FN: 1,
}
_WIDTHS = {dtype: _FLOAT_WIDTHS.get(dtype) or np.dtype(dtype.value).itemsize for dtype in DType}


@dataclass(frozen=True, slots=True)
class TensorType:
    """The shape and element type of a dense tensor; the type of every value in a graph."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def with_shape(self, shape: tuple[int, ...]) -> "TensorType":
        return TensorType(shape, self.dtype)

    def with_dtype(self, dtype: DType) -> "TensorType":
        return TensorType(self.shape, dtype)

    @property
    def on_device(self) -> "TensorType":
        """The type in the memory of a device, which has no 64-bit integers."""
        return self.with_dtype(self.dtype.on_device)

    def __str__(self) -> str:
        return f"{self.dtype.short}[{','.join(map(str, self.shape))}]"


def is_reasonable(tensor: TensorType) -> bool:
    """True if a tensor type is within the limits; an axis of size 0 counts as 1, so that it hides no other size."""
    return tensor.rank <= _MAX_RANK and math.prod(max(size, 1) for size in tensor.shape) <= _MAX_ELEMENTS


def promote(*types: TensorType) -> DType:
    """The element type of an elementwise result, by PyTorch's rule.

    The strongest kind wins: float, then integer, then bool. Within a kind, tensors with dimensions take precedence over
    scalars, so that `x + 1e-6` stays bfloat16 although the scalar is float32: the engines compute in float32 anyway.
    """
    strongest = max(_kind(t.dtype) for t in types)
    of_kind = [t for t in types if _kind(t.dtype) == strongest]
    voters = [t.dtype for t in of_kind if t.rank] or [t.dtype for t in of_kind]
    result = voters[0]
    for dtype in voters[1:]:
        result = _widest(result, dtype)
    return result


def _kind(dtype: DType) -> int:
    return 0 if dtype is DType.BOOL else 1 if dtype.is_integer else 2


def _widest(a: DType, b: DType) -> DType:
    if a is b:
        return a
    if a.is_float:
        return _widest_float(a, b)
    if DType.UINT64 in (a, b) and not {a, b} <= _UNSIGNED:
        return DType.INT64  # no integer type holds both
    return DType(np.promote_types(a.value, b.value).name)


def _widest_float(a: DType, b: DType) -> DType:
    """The wider of two float types; where neither contains the other, float32."""
    if a.itemsize != b.itemsize:
        return max(a, b, key=lambda dtype: dtype.itemsize)
    types = {a, b}
    return DType.FLOAT32 if DType.FLOAT32 in types or DType.TFLOAT32 not in types else DType.TFLOAT32
