"""Files with the documented layout of a NEFF, for the stand-in library: a header of 1024 bytes and an archive.

The archive has the documented members and `standin.txt`, which is ours: lines that declare the target, tensors and
operations. `@NAME` in an operation is the output NAME, every other name an input.

    arch trn1
    world 2
    input x 16 float32 4
    output y 16 float32 4
    op add y x w
"""

import io
import json
import struct
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

HEADER: Final = 1024
_SIZES: Final = {"float32": 4, "int32": 4, "bfloat16": 2, "uint8": 1, "pred": 1, "float8_e4": 1}

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Neff:
    """A program of the stand-in library. `dtypes` has the type of each tensor that is not float32."""

    inputs: Shapes
    outputs: Shapes
    operations: Sequence[str]
    arch: str = "trn1"
    world: int = 1
    dtypes: Mapping[str, str] = field(default_factory=dict)
    lnc: int = 1
    major: int = 2
    scratch: int = 0

    def text(self) -> str:
        """The member standin.txt."""
        lines = [f"arch {self.arch}", f"world {self.world}", f"scratch {self.scratch}"]
        for role, tensors in (("input", self.inputs), ("output", self.outputs)):
            lines += [self._declaration(role, name, shape) for name, shape in tensors.items()]
        return "\n".join([*lines, *(f"op {operation}" for operation in self.operations)]) + "\n"

    def members(self) -> dict[str, bytes]:
        variables = {name: {"type": "input"} for name in self.inputs} | {
            name: {"type": "output"} for name in self.outputs
        }
        graphs = [{"name": "sg00", "definition": "sg00/def.json"}]
        return {
            "kelf-0.json": json.dumps({"version": "0.5", "graphs": graphs}).encode(),
            "sg00/def.json": json.dumps({"var": variables}).encode(),
            "standin.txt": self.text().encode(),
        }

    def to_bytes(self) -> bytes:
        return pack(self.members(), major=self.major, lnc=self.lnc)

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path

    def _declaration(self, role: str, name: str, shape: Sequence[int]) -> str:
        dtype = self.dtypes.get(name, "float32")
        return f"{role} {name} {prod(shape) * _SIZES[dtype]} {dtype} {' '.join(map(str, shape))}"


def pack(members: Mapping[str, bytes], *, major: int = 2, lnc: int = 1) -> bytes:
    """A file with these members, whose archive is not compressed."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    body = archive.getvalue()
    header = bytearray(HEADER)
    struct.pack_into("<5Q", header, 0, 2, HEADER, len(body), major, 0)
    struct.pack_into("<I", header, 552, lnc)
    return bytes(header) + body


def addition(world: int = 1, **changes: object) -> Neff:
    """y = x + w, of four numbers; with several ranks the sum over all of them."""
    operations = ["add y x w"] if world == 1 else ["add y x w", "allreduce y @y"]
    return Neff({"x": (4,), "w": (4,)}, {"y": (4,)}, operations, world=world, **changes)  # type: ignore[arg-type]


def accumulator(**changes: object) -> Neff:
    """total += x, in place, and y = 2 * total."""
    operations = ["add total x total.must_alias_input", "scale y @total 2"]
    return Neff(
        {"x": (4,), "total.must_alias_input": (4,)}, {"total": (4,), "y": (4,)}, operations, **changes  # type: ignore[arg-type]
    )  # fmt: skip
