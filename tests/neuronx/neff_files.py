"""NEFF containers with the documented layout, made for tests."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

from nxpipe.emulator.executable.neff import HEADER

BUILD = "2.27.5334.0+stand-in"


@dataclass(frozen=True)
class Variable:
    name: str
    kind: str  # input, output, or a kind that no caller binds
    nbytes: int


def members(
    variables: Sequence[Variable], *, subgraphs: int = 1, extra: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """The files of a container, by name in the archive."""
    names = [f"sg{index:02}" for index in range(subgraphs)]
    graphs = [{"name": name, "definition": f"{name}/def.json"} for name in names]
    definition = {
        "var": {
            each.name: {"type": each.kind, "var_id": index, "size": each.nbytes} for index, each in enumerate(variables)
        }
    }
    found = {
        "info.json": _json({"name": "neuronx-cc", "version": BUILD}),
        "kelf-0.json": _json({"version": "0.5", "graphs": graphs}),
        "hlo_stats.json": _json({}),
    }
    for name in names:
        found |= {f"{name}/def.json": _json(definition), f"{name}/pe.bin": b"\x17" * 512}
    return found | dict(extra or {})


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def archive(files: Mapping[str, bytes], *, is_compressed: bool = True, tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tar_format) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(packed.getvalue(), mtime=0) if is_compressed else packed.getvalue()


def container(body: bytes, *, name: str = "file.neff", lnc: int = 1, uuid: UUID | None = None) -> bytes:
    """The header in front of an archive; without a uuid, a new one."""
    digest = hashlib.md5(body, usedforsecurity=False).hexdigest().encode()
    return (
        HEADER.pack(
            *(2, HEADER.size, len(body), 2, 0, BUILD.encode(), lnc, digest, (uuid or uuid4()).bytes),
            *(name.encode()[:255], lnc, bytes([lnc]), 0, lnc, b""),
        )
        + body
    )
