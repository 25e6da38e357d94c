"""Encoding and decoding of an executable's tables: ports, buffers, divisions, notes and constants."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Final

from nxpipe.emulator.executable.field_codecs import Reader, SharedWriter, WordReader, Writer
from nxpipe.emulator.hardware import CORES
from nxpipe.emulator.ir.types import DType, TensorType, is_reasonable
from nxpipe.emulator.isa.program import Buffer, Role
from nxpipe.emulator.ops.collective import Share, uneven
from nxpipe.emulator.passes.shard import Sharding


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor of the interface with the caller's type: divided states are whole, 64-bit integers keep their width.

    `sizes` is empty, or has a name for each axis along which a request may be shorter ("batch", "sequence"; "" for a
    fixed axis). Axes with the same name have the same length. The host pads such inputs at the end and crops outputs.
    """

    name: str
    role: Role
    type: TensorType
    sizes: tuple[str, ...] = ()


MOST_RANKS: Final = 1 << 16
MOST_TENSORS: Final = 1 << 16
_MOST_AXES: Final = 16
_DIGEST: Final = 32  # bytes


def write_ports(ports: Sequence[Port]) -> bytes:
    out = Writer()
    words = SharedWriter(out)
    out.number(len(ports))
    for port in ports:
        out.text(port.name)
        words.text(port.role)
        words.text(port.type.dtype)
        _write_numbers(out, port.type.shape)
        out.number(len(port.sizes))
        for name in port.sizes:
            words.text(name)
    return bytes(out.data)


def read_ports(source: Reader) -> tuple[Port, ...]:
    words = WordReader(source)
    ports = tuple(_read_port(source, words) for _ in range(source.count("ports")))
    if len({(port.name, port.role) for port in ports}) != len(ports):
        raise source.fault("two ports have the same name and role")
    source.end()
    return ports


def _read_port(source: Reader, words: WordReader) -> Port:
    name, role, dtype = source.text(), words.word(Role), words.word(DType)
    if role not in (Role.INPUT, Role.OUTPUT, Role.STATE):
        raise source.fault(f"port {name[:40]!r} is a {role}, and must be an input, output or state")
    shape = _read_shape(source, dtype)
    sizes = tuple(words.text() for _ in range(source.count("names of sizes", _MOST_AXES)))
    if len(sizes) not in (0, len(shape)) or (sizes and not any(sizes)):
        raise source.fault(f"port {name[:40]!r} of {len(shape)} axes has {len(sizes)} names of sizes")
    return Port(name, role, TensorType(shape, dtype), sizes)


def write_buffers(core: str, ranks: int, buffers: Sequence[Buffer]) -> bytes:
    out = Writer()
    words = SharedWriter(out)
    out.text(core)
    out.number(ranks)
    out.number(len(buffers))
    for buffer in buffers:
        words.text(buffer.role)
        words.text(buffer.dtype)
        out.number(buffer.address)
        _write_numbers(out, buffer.shape)
        _write_numbers(out, buffer.order)
        out.number(buffer.tile)
        out.number(len(buffer.names))
        for name in buffer.names:
            out.text(name)
    return bytes(out.data)


def read_buffers(source: Reader) -> tuple[str, int, tuple[Buffer, ...]]:
    core, ranks = source.text(), source.number()
    if core not in CORES:
        raise source.fault(f"unknown core {core[:40]!r}; known are {', '.join(CORES)}")
    if not 1 <= ranks <= MOST_RANKS:
        raise source.fault(f"a program has {ranks} ranks")
    words = WordReader(source)
    buffers = tuple(_read_buffer(source, words) for _ in range(source.count("buffers")))
    source.end()
    return core, ranks, buffers


def _read_buffer(source: Reader, words: WordReader) -> Buffer:
    role, dtype, address = words.word(Role), words.word(DType), source.number()
    shape, order, tile = _read_shape(source, dtype), _read_numbers(source), source.number()
    if order and sorted(order) != list(range(len(shape))):
        raise source.fault(f"{order} is not a permutation of {len(shape)} axes")
    if tile and (role is not Role.PARAMETER or len(shape) < 2):
        raise source.fault(f"a {role} of {len(shape)} axes is in tiles, and only a parameter of matrices can be")
    names = tuple(source.text() for _ in range(source.count("names", MOST_TENSORS)))
    if not names:
        raise source.fault("a buffer holds no tensor")
    return Buffer(role, names, dtype, shape, order, address, tile)


def write_divisions(divisions: Mapping[int, Sharding]) -> bytes:
    out = Writer()
    out.number(len(divisions))
    before = -1
    for number, piece in sorted(divisions.items()):
        out.number(number - before)
        out.number(piece.axis)
        out.number(len(piece.sizes))
        for share in piece.shares:
            for field in (share.size, share.parts, share.slots, share.length):
                out.number(field)
        before = number
    return bytes(out.data)


def read_divisions(source: Reader, ranks: int, buffers: Sequence[Buffer]) -> dict[int, Sharding]:
    divisions: dict[int, Sharding] = {}
    number = -1
    for _ in range(source.count("divisions")):
        number += source.number()
        axis = source.number()
        count = source.count("blocks", MOST_RANKS)
        shares = [Share(*(source.number() for _ in range(4))) for _ in range(count)]
        if number in divisions or not 0 <= number < len(buffers):
            raise source.fault(f"a division refers to buffer {number} of {len(buffers)}, or repeats one")
        if not _fits(axis, shares, buffers[number], ranks):
            raise source.fault(f"a division of axis {axis} does not fit buffer {number} on {ranks} ranks")
        sizes, parts = tuple(share.size for share in shares), tuple(share.parts for share in shares)
        divisions[number] = Sharding(axis, sizes, parts, *uneven(shares, ranks))
    source.end()
    return divisions


def _fits(axis: int, shares: Sequence[Share], buffer: Buffer, ranks: int) -> bool:
    """True if a rank's share has the length of the buffer on the divided axis."""
    if not shares or not all(share.is_possible(ranks) for share in shares):
        return False
    order = buffer.order or range(len(buffer.shape))
    lengths = [buffer.shape[position] for position, tensor_axis in enumerate(order) if tensor_axis == axis]
    return lengths == [sum(share.local for share in shares)]


def write_notes(notes: Sequence[str]) -> bytes:
    out = Writer()
    out.number(len(notes))
    for note in notes:
        out.text(note)
    return bytes(out.data)


def read_notes(source: Reader) -> tuple[str, ...]:
    notes = tuple(source.text() for _ in range(source.count("notes")))
    source.end()
    return notes


def write_constants(constants: Mapping[str, bytes]) -> bytes:
    out = Writer()
    out.number(len(constants))
    for digest, data in sorted(constants.items()):
        out.data += bytes.fromhex(digest)
        out.number(len(data))
        out.data += data
    return bytes(out.data)


def read_constants(source: Reader, buffers: Sequence[Buffer]) -> dict[str, bytes]:
    sizes = constant_sizes(buffers)
    constants: dict[str, bytes] = {}
    for _ in range(source.count("constants")):
        digest = source.raw(_DIGEST).hex()
        data = source.raw(source.number())
        if hashlib.sha256(data).hexdigest() != digest or len(data) not in sizes.get(digest, ()):
            raise source.fault(f"constant {digest[:16]} is damaged, or has no buffer of {len(data)} bytes")
        constants[digest] = data
    if any(digest >= following for digest, following in pairwise(constants)):
        raise source.fault("constants are not sorted by digest")
    source.end()
    return constants


def constant_sizes(buffers: Sequence[Buffer]) -> dict[str, set[int]]:
    """The sizes in bytes of each constant according to the buffers, by digest."""
    sizes: dict[str, set[int]] = {}
    for buffer in buffers:
        if buffer.role is Role.CONSTANT:
            for digest in buffer.names:
                sizes.setdefault(digest, set()).add(buffer.nbytes // len(buffer.names))
    return sizes


def _write_numbers(out: Writer, numbers: Sequence[int]) -> None:
    out.number(len(numbers))
    for number in numbers:
        out.number(number)


def _read_numbers(source: Reader) -> tuple[int, ...]:
    return tuple(source.number() for _ in range(source.count("axes", _MOST_AXES)))


def _read_shape(source: Reader, dtype: DType) -> tuple[int, ...]:
    shape = _read_numbers(source)
    if not is_reasonable(TensorType(shape, dtype)):
        raise source.fault(f"a tensor has {prod(shape)} elements, which is too many")
    return shape
