"""Fixed executables with every kind of content: examples for fuzzers, and donors for splices."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from nxpipe.emulator.executable.code import INSTRUCTIONS, kind_of
from nxpipe.emulator.executable.executable import Executable, to_bytes
from nxpipe.emulator.executable.tables import Port
from nxpipe.emulator.ir.types import DType, TensorType
from nxpipe.emulator.isa.affine import Affine, index, rotating_offset
from nxpipe.emulator.isa.instruction import Alu, Engine, Instruction, Wait
from nxpipe.emulator.isa.operands import Far, Memory, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role
from nxpipe.emulator.isa.scalar import Function
from nxpipe.emulator.passes.shard import Sharding

TABLE = bytes(range(64))


def tile(seed: int, *sizes: int) -> Tile:
    offset = rotating_offset(index(0) + seed % 2, 2, 2048) + seed * 64
    return Tile(Memory.SBUF, DType.BFLOAT16, 32 * (seed % 4), 32, offset, contiguous(*(sizes or (16,))))


def far(seed: int) -> Far:
    rows = Tile(Memory.SBUF, DType.UINT32, 0, 32, Affine(), contiguous(1)) if seed % 2 else None
    return Far(seed % 3, DType.BFLOAT16, index(1) * 512 + seed, contiguous(32, 16), rows)


def value(form: str, seed: int) -> Any:
    of: Mapping[str, Callable[[int], Any]] = {
        "affine": lambda seed: index(1) * 3 + index(0) + seed,
        "tile": tile,
        "far": far,
        "place": lambda seed: far(seed) if seed % 2 else tile(seed),
        "alu": lambda seed: list(Alu)[seed % len(Alu)],
        "function": lambda seed: list(Function)[seed % len(Function)],
        "flag": lambda seed: seed % 2 == 0,
        "real": lambda seed: 1.5 * seed,
        "whole": lambda seed: 1 - seed,
        "wholes": lambda seed: (seed, -seed),
        "real|tile": lambda seed: tile(seed, 1) if seed % 2 else 0.5,
    }
    if form.endswith("?") and seed % 2:
        return None
    return of[form.removesuffix("?")](seed)


def instruction(name: str, seed: int) -> Instruction:
    kind = kind_of(INSTRUCTIONS[name])
    engines = list(Engine)
    waits = tuple(Wait(engine, index(0) * 2 + seed) for engine in engines[: seed % 4])
    fields = {field: value(form, seed + number) for number, (field, form) in enumerate(kind.fields)}
    return kind.record(engine=engines[seed % len(engines)], waits=waits, note=seed % 3, **fields)


def sample(seed: int = 0) -> Executable:
    """Each instruction once, in two loops, on two ranks."""
    digest = hashlib.sha256(TABLE).hexdigest()
    body = tuple(instruction(name, seed + number) for number, name in enumerate(INSTRUCTIONS))
    half = len(body) // (2 + seed % 3)
    buffers = (
        Buffer(Role.INPUT, ("input_ids",), DType.INT32, (2, 32)),
        Buffer(Role.STATE, ("cache.0.key", "cache.1.key"), DType.BFLOAT16, (2, 4, 32), (), 4096),
        Buffer(Role.PARAMETER, ("0.weight", "1.weight"), DType.BFLOAT16, (32, 16), (1, 0), 8192, 8),
        Buffer(Role.CONSTANT, (digest,), DType.UINT8, (len(TABLE),), (), 12288),
        Buffer(Role.OUTPUT, ("logits",), DType.FLOAT32, (2, 1, 99), (), 16384),
    )
    ports = (
        Port("input_ids", Role.INPUT, TensorType((2, 32), DType.INT64), ("batch", "sequence")),
        *(Port(f"cache.{n}.key", Role.STATE, TensorType((2, 7, 32), DType.BFLOAT16)) for n in range(2)),
        Port("logits", Role.OUTPUT, TensorType((2, 1, 99), DType.FLOAT32), ("batch", "", "")),
    )
    divisions = {1: Sharding(1, (7,), (1,), (1,), (4,)), 2: Sharding(0, (16, 12), (2, 3), (1, 2), (8, 4))}
    loops = Loop(4, (Loop(3 + seed, body[:half]), *(Loop(2, (step,)) for step in body[half:])))
    notes = ("", "model.layers.0", f"model.norm at model.py:{seed}")
    return Executable(Program("v2", 2, buffers, (loops,), notes, {digest: TABLE}), ports, divisions)


def samples(first: int = 0) -> tuple[bytes, ...]:
    return tuple(to_bytes(sample(seed)) for seed in range(first, first + 4))
