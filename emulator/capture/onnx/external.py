"""External data of ONNX files: tensors in other files than the model's. Only this module opens them; onnx does not.

A location is untrusted input. It must name a regular file in the model's folder or below it, without symlinks and
without a second hard link, which could put another file of this machine into an artifact.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from onnx import ModelProto, TensorProto

from nxpipe.emulator.capture.onnx.limits import SHARED_DATA
from nxpipe.emulator.errors import DataUnusable
from nxpipe.emulator.regular_file import open_regular

_MOST_DIGITS = 19  # of a 64-bit number


@dataclass(frozen=True)
class ExternalData:
    """The location of a tensor's bytes; without `length` they extend to the end of the file."""

    location: str
    offset: int
    length: int | None

    @property
    def end(self) -> int:
        return self.offset + (self.length or 0)


def tensors_of(message: Any) -> Iterator[TensorProto]:
    """All tensors of a model, found by the protobuf descriptors: those in graphs of attributes, functions and their
    defaults, sparse tensors and training too.
    """
    stack = [message]
    while stack:
        current = stack.pop()
        if isinstance(current, TensorProto):
            yield current
            continue
        for field, value in current.ListFields():
            if field.message_type is not None and _may_hold_tensors(field.message_type):
                stack.extend(value if field.is_repeated else (value,))


@cache
def _may_hold_tensors(kind: Any) -> bool:
    seen, stack = {kind.full_name}, [kind]
    while stack:
        current = stack.pop()
        if current.full_name == TensorProto.DESCRIPTOR.full_name:
            return True
        inner = [field.message_type for field in current.fields if field.message_type is not None]
        stack.extend(message for message in inner if message.full_name not in seen)
        seen.update(message.full_name for message in inner)
    return False


def external_data_of(tensor: TensorProto) -> ExternalData | None:
    """The external data of a tensor; None if its bytes are in the ONNX file."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return ExternalData(
        _relative(tensor, entries.get("location", "")),
        _number(tensor, "offset", entries.get("offset", "0")),
        _number(tensor, "length", entries["length"]) if "length" in entries else None,
    )


def data_locations(model: ModelProto) -> tuple[str, ...]:
    """The sorted locations of a model's external data; without invalid ones, which are refused when they are read."""
    locations: set[str] = set()
    for tensor in tensors_of(model):
        with suppress(DataUnusable):
            data = external_data_of(tensor)
            locations.update([data.location] if data is not None else [])
    return tuple(sorted(locations))


def _relative(tensor: TensorProto, location: str) -> str:
    path = PurePosixPath(location)
    if not path.parts or not location.isprintable():
        raise DataUnusable(f"the data of {tensor.name!r} is in {location!r}, which is not a file name; export it again")
    if path.is_absolute() or ".." in path.parts:
        raise DataUnusable(f"the data of {tensor.name!r} in {location} is outside of its folder, and is never read")
    return str(path)


def _number(tensor: TensorProto, key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise DataUnusable(
            f"the {key} of the data of {tensor.name!r} is {text[:40]!r}, not a number of bytes; export it again"
        )
    return int(text)


@dataclass(frozen=True)
class DataFolder:
    """The folder of a model's external data, and the model's name for messages."""

    path: Path
    name: str

    def files(self, model: ModelProto) -> dict[str, int]:
        """The external data files of a model: location to minimum size in bytes. All exist and are in the folder."""
        entries = [data for data in map(self._external_data, tensors_of(model)) if data is not None]
        needed: dict[str, int] = {}
        for data in entries:
            needed[data.location] = max(needed.get(data.location, 0), data.end)
        sizes = {location: self._size(location, size) for location, size in needed.items()}
        read = sum(sizes[data.location] - data.offset if data.length is None else data.length for data in entries)
        most = SHARED_DATA * sum(sizes.values())
        if read > most:  # tensors that overlap in the file take memory separately
            raise DataUnusable(
                f"{self.name}: its tensors read {read:,} bytes of its external data files, which have "
                f"{most // SHARED_DATA:,}, and the limit is {SHARED_DATA} times that; give tensors bytes of their own"
            )
        return needed

    def embedded(self, tensor: TensorProto) -> TensorProto:
        """The tensor with its bytes embedded; the same object if they are already."""
        data = self._external_data(tensor)
        if data is None:
            return tensor
        self._size(data.location, data.end)
        with self._opened(data.location) as file:
            file.seek(data.offset)
            raw = file.read(-1 if data.length is None else data.length)
        return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)

    def _external_data(self, tensor: TensorProto) -> ExternalData | None:
        try:
            return external_data_of(tensor)
        except DataUnusable as fault:
            raise DataUnusable(f"{self.name}: {fault}") from None

    def _size(self, location: str, needed: int) -> int:
        """The size of a data file; DataUnusable if it is shorter than needed."""
        with self._opened(location) as file:
            size = os.fstat(file.fileno()).st_size
        if size < needed:
            raise DataUnusable(
                f"{self.name}: its weights in {location} end at byte {size:,}, but the model needs {needed:,}; "
                "copy that file again"
            )
        return size

    def _opened(self, location: str) -> BufferedReader:
        try:
            self._require_no_link(location)
            file = open_regular(self.path / location)
        except OSError as fault:
            raise DataUnusable(
                f"{self.name}: its weights in {location} cannot be read ({fault.strerror or fault}); "
                "keep both files in one folder"
            ) from fault
        if os.fstat(file.fileno()).st_nlink > 1:
            file.close()
            raise DataUnusable(
                f"{self.name}: its data in {location} has a second name (a hard link), which may be outside of its "
                "folder; put a copy of the file there"
            )
        return file

    def _require_no_link(self, location: str) -> None:
        """Raise DataUnusable for a symlink below the model's folder. The path of the folder itself may have
        symlinks."""
        path = self.path
        for part in PurePosixPath(location).parts:
            path = path / part
            if stat.S_ISLNK(path.lstat().st_mode):
                raise DataUnusable(
                    f"{self.name}: its data in {location} is behind a symlink, which is never followed because it may "
                    "lead out of its folder; put a copy of the file there"
                )
