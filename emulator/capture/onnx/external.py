"""External data of ONNX files: tensors in files beside the model. Nothing else opens such a file, onnx neither.

A location is untrusted input. It has to name a regular file at or below the model's folder, reached through no link:
a symlink, or a second hard link, could put a file of this machine into an artifact.
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

_MOST_DIGITS = 19  # of a number of 64 bits


@dataclass(frozen=True)
class ExternalData:
    """Where a tensor's bytes lie: `length` None means up to the end of the file."""

    location: str
    offset: int
    length: int | None

    @property
    def end(self) -> int:
        return self.offset + (self.length or 0)


def tensors_of(message: Any) -> Iterator[TensorProto]:
    """Every tensor of a model, wherever the format allows one: what a key, a check or a reader must not overlook.

    It goes by the format's own description, not by a list of places: graphs in attributes, functions and their
    defaults, sparse tensors, training.
    """
    waiting = [message]
    while waiting:
        here = waiting.pop()
        if isinstance(here, TensorProto):
            yield here
            continue
        for field, value in here.ListFields():
            if field.message_type is not None and _may_hold_tensors(field.message_type):
                waiting.extend(value if field.is_repeated else (value,))


@cache
def _may_hold_tensors(kind: Any) -> bool:
    seen, waiting = {kind.full_name}, [kind]
    while waiting:
        here = waiting.pop()
        if here.full_name == TensorProto.DESCRIPTOR.full_name:
            return True
        inner = [field.message_type for field in here.fields if field.message_type is not None]
        waiting.extend(one for one in inner if one.full_name not in seen)
        seen.update(one.full_name for one in inner)
    return False


def external_data_of(tensor: TensorProto) -> ExternalData | None:
    """Where the bytes of a tensor lie, if not in the ONNX file itself."""
    if tensor.data_location != TensorProto.EXTERNAL:
        return None
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return ExternalData(
        _relative(tensor, entries.get("location", "")),
        _number(tensor, "offset", entries.get("offset", "0")),
        _number(tensor, "length", entries["length"]) if "length" in entries else None,
    )


def data_locations(model: ModelProto) -> tuple[str, ...]:
    """The locations of data in a model, in order; those that are refused when they are read are left out."""
    found: set[str] = set()
    for tensor in tensors_of(model):
        with suppress(DataUnusable):
            place = external_data_of(tensor)
            found.update([place.location] if place is not None else [])
    return tuple(sorted(found))


def _relative(tensor: TensorProto, location: str) -> str:
    path = PurePosixPath(location)
    if not path.parts or not location.isprintable():
        raise DataUnusable(f"the data of {tensor.name!r} is in {location!r}, which names no file; export it again")
    if path.is_absolute() or ".." in path.parts:
        raise DataUnusable(f"the data of {tensor.name!r} in {location} is outside of its folder, and is never read")
    return str(path)


def _number(tensor: TensorProto, key: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise DataUnusable(
            f"the {key} of the data of {tensor.name!r} is {text[:40]!r}, which is no number of bytes; export it again"
        )
    return int(text)


@dataclass(frozen=True)
class DataFolder:
    """The folder of a model, and the model's name for what is said of its files of data."""

    path: Path
    name: str

    def files(self, model: ModelProto) -> dict[str, int]:
        """Each by its name in the model, with the bytes that it must have at least. All are there, and inside."""
        places = [place for place in map(self._place, tensors_of(model)) if place is not None]
        needed: dict[str, int] = {}
        for place in places:
            needed[place.location] = max(needed.get(place.location, 0), place.end)
        sizes = {location: self._size(location, size) for location, size in needed.items()}
        read = sum(sizes[one.location] - one.offset if one.length is None else one.length for one in places)
        most = SHARED_DATA * sum(sizes.values())
        if read > most:  # a thousand tensors over the same bytes take a thousand times the memory that they say
            raise DataUnusable(
                f"{self.name}: its tensors read {read:,} bytes of its files of data, which have "
                f"{most // SHARED_DATA:,}, and the limit is {SHARED_DATA} times that; give tensors bytes of their own"
            )
        return needed

    def embedded(self, tensor: TensorProto) -> TensorProto:
        """The tensor with its bytes in it; the one that was given if they are already."""
        place = self._place(tensor)
        if place is None:
            return tensor
        self._size(place.location, place.end)
        with self._opened(place.location) as file:
            file.seek(place.offset)
            data = file.read(-1 if place.length is None else place.length)
        return TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, raw_data=data)

    def _place(self, tensor: TensorProto) -> ExternalData | None:
        try:
            return external_data_of(tensor)
        except DataUnusable as fault:
            raise DataUnusable(f"{self.name}: {fault}") from None

    def _size(self, location: str, promised: int) -> int:
        with self._opened(location) as file:
            found = os.fstat(file.fileno()).st_size
        if found < promised:
            raise DataUnusable(
                f"{self.name}: its weights in {location} end at byte {found:,}, where {promised:,} are promised; "
                "copy that file again"
            )
        return found

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
        """On the way to the file below the folder. The folder itself may be reached through links: it is the user's."""
        path = self.path
        for part in PurePosixPath(location).parts:
            path = path / part
            if stat.S_ISLNK(path.lstat().st_mode):
                raise DataUnusable(
                    f"{self.name}: its data in {location} is behind a symlink, which is never followed because it may "
                    "lead out of its folder; put a copy of the file there"
                )
