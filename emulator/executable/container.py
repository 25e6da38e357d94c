"""The outside of an executable file: which sections there are, where each lies, and that it is whole."""

import hashlib
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from nxpipe.emulator.errors import ExecutableInvalid
from nxpipe.emulator.executable.field_codecs import Reader

MAGIC: Final = b"\x89NXE\r\n\x1a\n"
VERSION: Final = 2
LONGEST_FILE: Final = 32 << 20  # bytes
_HEAD: Final = struct.Struct("<8sII")
_ROW: Final = struct.Struct("<IQQ32s")


class Section(IntEnum):
    TOTALS = 1
    INTERFACE = 2
    BUFFERS = 3
    DIVISIONS = 4
    NOTES = 5
    CODE = 6
    CONSTANTS = 7

    @property
    def label(self) -> str:
        return self.name.lower()


BODY: Final = _HEAD.size + len(Section) * _ROW.size  # where the first section begins


def packed(sections: Mapping[Section, bytes]) -> bytes:
    rows, offset = [], BODY
    for section in Section:
        data = sections[section]
        rows.append(_ROW.pack(section, offset, len(data), hashlib.sha256(data).digest()))
        offset += len(data)
    if offset > LONGEST_FILE:
        raise ExecutableInvalid(LONGEST_FILE, _too_long(offset))
    return b"".join([_HEAD.pack(MAGIC, VERSION, len(Section)), *rows, *(sections[section] for section in Section)])


def unpacked(data: bytes) -> dict[Section, Reader]:
    """A reader for each section, whose digests are right."""
    if len(data) > LONGEST_FILE:
        raise ExecutableInvalid(LONGEST_FILE, _too_long(len(data)))
    if not data.startswith(MAGIC):
        raise ExecutableInvalid(0, "the file does not begin like an executable")
    if len(data) < BODY:
        raise ExecutableInvalid(len(data), f"the file ends before its table of sections does, at {BODY}")
    _, version, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ExecutableInvalid(8, f"the file has version {version}, and this reader knows {VERSION}; build it anew")
    if count != len(Section):
        raise ExecutableInvalid(12, f"there are {count} sections, and version {VERSION} has {len(Section)}")
    readers, offset = {}, BODY
    for number, section in enumerate(Section):
        readers[section] = _section(data, _HEAD.size + number * _ROW.size, section, offset)
        offset += readers[section].left
    if offset != len(data):
        raise ExecutableInvalid(offset, f"{len(data) - offset} bytes follow the last section")
    return readers


def _section(data: bytes, row: int, section: Section, expected: int) -> Reader:
    kind, offset, size, digest = _ROW.unpack_from(data, row)
    if kind != section:
        raise ExecutableInvalid(row, f"section {kind} stands where {section.label}, {section:d}, belongs")
    if offset != expected:
        raise ExecutableInvalid(row + 4, f"{section.label} is said to begin at {offset}, and begins at {expected}")
    if size > len(data) - offset:
        raise ExecutableInvalid(row + 12, f"{section.label} takes {size} bytes, and {len(data) - offset} are left")
    if hashlib.sha256(memoryview(data)[offset : offset + size]).digest() != digest:
        raise ExecutableInvalid(offset, f"{section.label} is damaged: its SHA-256 is not the one in the table")
    return Reader(data, offset, offset + size)


def _too_long(size: int) -> str:
    return f"the file takes {size} bytes or more, and {LONGEST_FILE} are allowed"
