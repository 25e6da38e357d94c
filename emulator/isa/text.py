"""Text form of programs: one line for each instruction, indented loops, operands as in docs/reference/isa.md.

The text is exact: the assembler in the tests parses it to an equal program.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from enum import Enum

from nxpipe.emulator.ir.repeat import Series, series_of
from nxpipe.emulator.isa.affine import Affine
from nxpipe.emulator.isa.instruction import Engine, Instruction
from nxpipe.emulator.isa.operands import Axis, Far, Tile, contiguous
from nxpipe.emulator.isa.program import Buffer, Loop, Program, Role, Step

ARROW = "<-"
# Fields that are written before the operands, at the end, or on a line of their own.
_NOT_OPERANDS = ("dst", "engine", "waits", "note")
_BYTES_A_LINE = 64
_DIGEST_DIGITS = 8
_NOT_IN_A_LABEL = re.compile(r"[^A-Za-z0-9_.*~-]")
_SHORTEST_SERIES = 3


def text(program: Program, *, only: Engine | None = None, tables: bool = True) -> str:
    """The whole program, or the instructions of one engine; `tables` adds the bytes of constants."""
    return "\n".join(lines(program, only=only, tables=tables)) + "\n"


def lines(program: Program, *, only: Engine | None = None, tables: bool = True) -> Iterator[str]:
    labels = labelled(program.buffers)
    yield f"core {program.core}, ranks {program.ranks}"
    for buffer, label in zip(program.buffers, labels, strict=True):
        yield _buffer(buffer, label)
    yield ""
    yield from _Body(program, labels, only).steps(program.body)
    if any(program.notes):
        yield ""
    for number, note in enumerate(program.notes):
        if note or number:
            yield f"note {number} {json.dumps(note)}"
    if not program.notes:
        yield "notes none"
    if tables and program.constants:
        yield ""
        yield from _constants(program)


def line(instruction: Instruction, labels: Sequence[str]) -> str:
    """The text of one instruction; `labels` are the names of the buffers, by number."""
    words = [f"{instruction.engine:<6} {instruction.name}"]
    dst, operands = "", []
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if field.name == "dst":
            dst = _value(value, labels)
        elif field.name not in _NOT_OPERANDS and not _is_default(value, field.default):
            key = "" if field.name == "src" else f"{field.name}="
            # A float field may hold a bool, an int or a numpy number.
            is_number = field.type in (float, float | Tile) and not isinstance(value, Tile)
            operands.append(key + (repr(float(value)) if is_number else _value(value, labels)))
    words.append(f"{dst} {ARROW} {', '.join(operands)}")
    line = " ".join(words)
    waits = ", ".join(f"{wait.engine}>={affine_text(wait.done)}" for wait in instruction.waits)
    return f"{line}  after {waits}" if waits else line


def _is_default(value: object, default: object) -> bool:
    """True if a field has its default value. The text is compared too, because -0.0 equals 0.0."""
    return default is not MISSING and value == default and str(value) == str(default)


def labelled(buffers: Sequence[Buffer]) -> tuple[str, ...]:
    """A unique label for each buffer: the name of its tensor, with illegal characters replaced."""
    labels: dict[str, None] = {"sbuf": None, "psum": None}
    for buffer in buffers:
        stem = label = _NOT_IN_A_LABEL.sub("_", _buffer_name(buffer)) or "buffer"
        number = 1
        while label in labels:
            number += 1
            label = f"{stem}~{number}"
        labels[label] = None
    return tuple(labels)[2:]


def _buffer_name(buffer: Buffer) -> str:
    series, name = _series(buffer.names), next(iter(buffer.names), "")
    if buffer.role is Role.CONSTANT:
        return f"constant.{name[:_DIGEST_DIGITS]}"
    return f"{series.prefix}*{series.suffix}" if series else name


def affine_text(value: Affine) -> str:
    parts = [str(value.base)] if value.base or not (value.terms or value.rotations) else []
    parts += [_times(coefficient, f"i{depth}") for depth, coefficient in value.terms]
    parts += [_times(rotation.step, f"({_wrapped(rotation.of)} % {rotation.count})") for rotation in value.rotations]
    return "+".join(parts).replace("+-", "-")


def _wrapped(value: Affine) -> str:
    many = bool(value.base) + len(value.terms) > 1
    return f"({affine_text(value)})" if many else affine_text(value)


def _times(factor: int, what: str) -> str:
    return {1: what, -1: f"-{what}"}.get(factor, f"{factor}*{what}")


def _value(value: object, labels: Sequence[str]) -> str:
    match value:
        case Tile():
            return _tile(value)
        case Far():
            rows = f", rows {_tile(value.rows)}" if value.rows else ""
            label = labels[value.buffer] if 0 <= value.buffer < len(labels) else f"?{value.buffer}"
            return f"{label}[{affine_text(value.offset)} : {_pattern(value.dtype.short, value.axes)}{rows}]"
        case Affine():
            return affine_text(value)
        case Enum():
            return str(value.value)
        case bool():
            return "true" if value else "false"
        case tuple():
            return f"[{','.join(map(str, value))}]"
    return str(value)


def _tile(tile: Tile) -> str:
    lanes = f"{tile.start}:{tile.start + tile.partitions}"
    return f"{tile.memory}[{lanes}, {affine_text(tile.offset)} : {_pattern(tile.dtype.short, tile.axes)}]"


def _pattern(dtype: str, axes: tuple[Axis, ...]) -> str:
    """The type and sizes, with the strides of axes that are not contiguous."""
    dense = contiguous(*(axis.size for axis in axes))
    strided = any(axis != plain for axis, plain in zip(axes, dense, strict=True))
    sizes = [
        f"{axis.size}" if axis == plain else f"{axis.size}@{axis.stride}"
        for axis, plain in zip(axes, dense, strict=True)
    ]
    return f"{dtype} {(' x ' if strided else 'x').join(sizes)}".rstrip()


def _buffer(buffer: Buffer, label: str) -> str:
    shape = ",".join(map(str, buffer.shape))
    line = f"{buffer.role} {label}: {buffer.dtype.short}[{shape}] at {buffer.address}"
    if buffer.order:
        line += f" order [{','.join(map(str, buffer.order))}]"
    if buffer.tile:
        line += f" tile {buffer.tile}"
    if buffer.names == (label,):
        return line
    series = _series(buffer.names)
    if not series:
        return f"{line} names {', '.join(map(json.dumps, buffer.names))}".rstrip()
    last = series.first + (len(buffer.names) - 1) * series.step
    step = f"/{series.step}" if series.step > 1 else ""
    return f"{line} names {json.dumps(series.prefix)} {series.first}..{last}{step} {json.dumps(series.suffix)}"


def _series(names: Sequence[str]) -> Series | None:
    return series_of(names) if len(names) >= _SHORTEST_SERIES else None


def _constants(program: Program) -> Iterator[str]:
    for digest, data in program.constants.items():
        for start in range(0, max(len(data), 1), _BYTES_A_LINE):
            yield f"bytes {json.dumps(digest)} {data[start : start + _BYTES_A_LINE].hex()}".rstrip()


class _Body:
    """The lines of the body; a note is written where it changes."""

    def __init__(self, program: Program, labels: Sequence[str], only: Engine | None) -> None:
        self._program = program
        self._labels = labels
        self._only = only
        self._note = 0

    def steps(self, body: tuple[Step, ...], depth: int = 0) -> Iterator[str]:
        margin = "  " * depth
        for step in body:
            if isinstance(step, Loop):
                inside = list(self.steps(step.body, depth + 1))
                if inside or self._only is None:
                    yield f"{margin}loop i{depth} < {step.count}:"
                    yield from inside
            elif self._only in (None, step.engine):
                yield from self._note_line(step.note, margin)
                yield margin + line(step, self._labels)

    def _note_line(self, note: int, margin: str) -> Iterator[str]:
        if note == self._note:
            return
        self._note = note
        notes = self._program.notes
        comment = json.dumps(notes[note])[1:-1] if 0 <= note < len(notes) else ""
        yield f"{margin}at {note}  # {comment}".removesuffix("  # ")
