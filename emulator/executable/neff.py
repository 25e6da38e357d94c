"""NEFF files: the header and the variables of a program that neuronx-cc compiled, read without a device.

A NEFF is a header of 1024 bytes and a tar archive, compressed unless it was made for fast loading. The documented parts
are the header, `kelf-0.json`, and the variables of each subgraph in its `def.json`; the rest is skipped. The file is
untrusted: nothing is extracted, sizes are limited, and each defect is a `NeffInvalid` of one sentence. The module needs
the standard library only, since instances read NEFFs too. docs/reference/hlo-proto.md has the layout.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, Final, Literal
from uuid import UUID

from nxpipe.emulator.errors import NeffInvalid
from nxpipe.emulator.hlo.schema import ALIAS_SUFFIX
from nxpipe.emulator.regular_file import open_regular

HEADER: Final = Struct("<5Q128sI32s16s256sI64sQI468s")
MAX_HEADER: Final = 64 << 10
MAX_BODY: Final = 64 << 30  # unpacked bytes
MAX_DOCUMENT: Final = 64 << 20  # bytes of one JSON document; all but a few are far smaller
MAX_MEMBERS: Final = 100_000

_BLOCK: Final = 512
_CHUNK: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"
_DOCUMENT: Final = re.compile(r"kelf-[0-9]+\.json|info\.json|[A-Za-z0-9_-]+/def\.json")
_PAX_SIZE: Final = re.compile(rb"(?:^|\n)[0-9]+ size=([0-9]{1,11})\n")
_INDEX: Final = "kelf-0.json"


@dataclass(frozen=True)
class NeffHeader:
    package_version: int
    version: tuple[int, int]
    build_version: str
    name: str  # the path where it was built
    uuid: UUID  # another one for each compilation
    digest: bytes
    tpb_count: int
    requested_tpb_count: int
    tpb_per_node: bytes
    feature_bits: int
    lnc_size: int  # 0 in older files


@dataclass(frozen=True, order=True)
class NeffVariable:
    """A tensor that the program's caller binds. The file has neither its type nor its shape."""

    name: str
    nbytes: int
    direction: Literal["input", "output"]

    @property
    def tensor(self) -> str:
        """The name without nkipy's suffix: an input and an output of one tensor share it."""
        return self.name.removesuffix(ALIAS_SUFFIX)


@dataclass(frozen=True)
class NeffSubgraph:
    """The part of one physical core: with two cores for a logical one, a NEFF has two."""

    name: str
    variables: tuple[NeffVariable, ...]


@dataclass(frozen=True)
class Neff:
    """`info` has what the compiler noted about itself, such as its version; it is not documented."""

    header: NeffHeader
    subgraphs: tuple[NeffSubgraph, ...]
    info: Mapping[str, str]

    @property
    def physical_cores(self) -> int:
        """Physical cores of a logical one (LNC), as the program was compiled. Older files do not have the number in
        their header, but a subgraph for each core."""
        return self.header.lnc_size or len(self.subgraphs)

    @property
    def inputs(self) -> tuple[NeffVariable, ...]:
        """The inputs over all subgraphs, in the order of their names."""
        return self._variables("input")

    @property
    def outputs(self) -> tuple[NeffVariable, ...]:
        return self._variables("output")

    def _variables(self, direction: str) -> tuple[NeffVariable, ...]:
        found: dict[str, NeffVariable] = {}
        for subgraph in self.subgraphs:
            for each in subgraph.variables:
                if each.direction == direction and found.setdefault(each.name, each) != each:
                    raise NeffInvalid(f"the subgraphs give {direction} {each.name!r} different sizes")
        return tuple(sorted(found.values()))


def open_neff(path: Path) -> Neff:
    """The NEFF of a path; OSError if it cannot be opened."""
    with open_regular(path) as file:
        return read_neff(file)


def read_neff(file: BinaryIO) -> Neff:
    """The NEFF that a file holds from its current position to its end."""
    data = file.read(HEADER.size)
    if len(data) < HEADER.size:
        raise NeffInvalid(f"it ends after {len(data)} bytes, within its header of {HEADER.size}")
    fields = HEADER.unpack(data)
    package, header_size, _, major, minor = fields[:5]
    build, tpb_count, digest, uuid, name, requested, per_node, features, lnc_size, _ = fields[5:]
    if not HEADER.size <= header_size <= MAX_HEADER:
        raise NeffInvalid(f"its header says that it has {header_size} bytes, and {HEADER.size} are documented")
    file.read(header_size - HEADER.size)
    header = NeffHeader(
        package_version=package,
        version=(major, minor),
        build_version=_text(build),
        name=_text(name),
        uuid=UUID(bytes=uuid),
        digest=digest,
        tpb_count=tpb_count,
        requested_tpb_count=requested,
        tpb_per_node=per_node,
        feature_bits=features,
        lnc_size=lnc_size,
    )
    documents = dict(_documents(_Body(file)))
    subgraphs = tuple(_subgraph(name, path, documents) for name, path in _graphs(documents))
    return Neff(header, subgraphs, _info(documents))


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="replace")


class _Body:
    """The unpacked bytes of the archive, in order and to a limit."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packed = file.read(_CHUNK)
        self._zip = zlib.decompressobj(wbits=31) if self._packed[:2] == _GZIP else None
        self._buffer, self._at = b"", 0
        self._left = MAX_BODY

    def take(self, size: int) -> bytes:
        """Exactly so many bytes, or none at the end."""
        parts, missing = [], size
        while missing:
            part = self._buffer[self._at : self._at + missing]
            self._at += len(part)
            missing -= len(part)
            parts.append(part)
            if missing and not self._refill():
                break
        if 0 < missing < size:
            raise NeffInvalid("its archive is truncated")
        return b"".join(parts)

    def skip(self, size: int) -> None:
        for start in range(0, size, _CHUNK):
            if not self.take(min(_CHUNK, size - start)):
                raise NeffInvalid("its archive is truncated")

    def drain(self) -> None:
        """Read to the end, where gzip has its checksum."""
        while self._refill():
            pass
        if self._zip and not self._zip.eof:
            raise NeffInvalid("its compressed archive is truncated")

    def _refill(self) -> bool:
        self._buffer, self._at = self._next() if self._zip is None else self._decompressed(self._zip), 0
        self._left -= len(self._buffer)
        if self._left < 0:
            raise NeffInvalid(f"its archive has more than {MAX_BODY:,} bytes")
        return bool(self._buffer)

    def _next(self) -> bytes:
        """The next bytes of the file."""
        packed, self._packed = self._packed or self._file.read(_CHUNK), b""
        return packed

    def _decompressed(self, unzip: "zlib._Decompress") -> bytes:
        """The next bytes, a chunk at most for any ratio of compression."""
        try:
            while not unzip.eof:
                packed = unzip.unconsumed_tail or self._next()
                unpacked = unzip.decompress(packed, _CHUNK)
                if unpacked or not packed:
                    return unpacked
        except zlib.error as error:
            raise NeffInvalid("its compressed archive is damaged") from error
        return b""


def _documents(body: _Body) -> Iterator[tuple[str, object]]:
    """The JSON documents of the archive that the layout names."""
    seen = set()
    for name, size in _members(body):
        if not _DOCUMENT.fullmatch(name):
            body.skip(_padded(size))
            continue
        if name in seen or size > MAX_DOCUMENT:
            raise NeffInvalid(f"{name!r} occurs twice" if name in seen else f"{name!r} has {size:,} bytes")
        seen.add(name)
        data = body.take(_padded(size))[:size]
        try:
            yield name, json.loads(data)
        except (ValueError, RecursionError) as error:
            raise NeffInvalid(f"{name!r} is no JSON document") from error
    body.drain()


def _members(body: _Body) -> Iterator[tuple[str, int]]:
    """Name and size of each file of a tar archive; the caller takes or skips its content before the next."""
    long_name, long_size = "", None
    for _ in range(MAX_MEMBERS):
        block = body.take(_BLOCK)
        if not block.strip(b"\0"):  # the end, or no more bytes
            return
        size, kind = _checked(block), block[156:157]
        if kind == b"L" and size <= _BLOCK:
            long_name = _text(body.take(_padded(size)))
        elif kind in (b"x", b"g") and size <= MAX_HEADER:
            attribute = _PAX_SIZE.search(body.take(_padded(size)))  # the others are owners, times and longer names
            long_size = int(attribute[1]) if attribute and kind == b"x" else None
        elif kind in (b"0", b"\0"):
            prefix = _text(block[345:500]) if block[257:262] == b"ustar" and block[263:265] == b"00" else ""
            name = long_name or "/".join(filter(None, (prefix, _text(block[:100]))))
            size = size if long_size is None else long_size
            long_name, long_size = "", None
            yield name.removeprefix("./"), size
        elif kind != b"5":
            raise NeffInvalid(f"its archive has a member of kind {kind!r}")
    raise NeffInvalid(f"its archive has more than {MAX_MEMBERS:,} members")


def _checked(block: bytes) -> int:
    """The size in a member's header, whose checksum is right."""
    claimed = _number(block[148:156])
    if claimed != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise NeffInvalid("its archive has a damaged member")
    size = _number(block[124:136])
    if size > MAX_BODY:
        raise NeffInvalid(f"its archive has a member of {size:,} bytes")
    return size


def _number(field: bytes) -> int:
    if field[:1] == b"\x80":  # too large for octal digits
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0") or b"0"
    if not re.fullmatch(rb"[0-7]+", digits):
        raise NeffInvalid("its archive has a damaged member")
    return int(digits, 8)


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _graphs(documents: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Name and definition of each subgraph."""
    index = documents.get(_INDEX)
    graphs = index.get("graphs") if isinstance(index, dict) else None
    if not isinstance(graphs, list) or not graphs:
        raise NeffInvalid(f"it has no {_INDEX} with a list of graphs")
    for graph in graphs:
        name, path = (graph.get("name"), graph.get("definition")) if isinstance(graph, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(path, str):
            raise NeffInvalid(f"a graph in {_INDEX} has no name or no definition")
        yield name, path


def _subgraph(name: str, path: str, documents: Mapping[str, object]) -> NeffSubgraph:
    definition = documents.get(path)
    variables = definition.get("var") if isinstance(definition, dict) else None
    if not isinstance(variables, dict):
        raise NeffInvalid(f"subgraph {name!r} has no variables in {path!r}")
    return NeffSubgraph(name, tuple(_interface(name, variables)))


def _interface(subgraph: str, variables: Mapping[str, Any]) -> Iterator[NeffVariable]:
    for name, fields in sorted(variables.items()):
        kind = fields.get("type") if isinstance(fields, dict) else None
        if not isinstance(kind, str):
            raise NeffInvalid(f"variable {name!r} of subgraph {subgraph!r} has no type")
        if kind in ("input", "output"):
            size = fields.get("size")
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MAX_BODY:
                raise NeffInvalid(f"{kind} {name!r} of subgraph {subgraph!r} has no size in bytes")
            yield NeffVariable(name, size, "input" if kind == "input" else "output")


def _info(documents: Mapping[str, object]) -> dict[str, str]:
    found = documents.get("info.json")
    fields = found.items() if isinstance(found, dict) else ()
    return {name: str(value) for name, value in fields if isinstance(value, (str, int, float))}
