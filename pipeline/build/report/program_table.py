"""The programs of an artifact as a table: predicted time, what bounds it, traffic, utilisation, accuracy."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from nxpipe.pipeline.models.thresholds import Report, references_of
from nxpipe.pipeline.util.text import Column, human_bytes, table

_COLUMNS: Final = (
    Column("program"),
    Column("predicted"),
    Column("bound by"),
    Column("HBM traffic", drop=3),
    Column("of minimum", drop=6),
    Column("spill", drop=5),
    Column("tensor util.", drop=2),
    Column("cosine"),
    Column("max error"),
    Column("AWS's compiler", drop=4, whole=True),
)


def program_table(figures: Mapping[str, Any], verified: Report) -> str:
    """A row for each program, the smallest first, and a line that says what its figures are. An artifact of another
    producer may lack figures, which are then absent, never zero."""
    names = sorted({*figures, *verified}, key=by_size)
    rows = [(name, *_times(figures.get(name)), *_accuracy(verified.get(name, ()))) for name in names]
    rows = [(*row, _aws(figures.get(row[0]))) for row in rows]
    used = [n for n in range(len(_COLUMNS)) if n < 2 or any(row[n] != "-" for row in rows)]
    lines = table([_COLUMNS[n] for n in used], [[row[n] for n in used] for row in rows])
    references = ", ".join(references_of(verified))
    note = f"cosine and largest relative error: of the worst output, against {references}"
    return f"{lines}\n{note}" if references else lines


def by_size(program: str) -> tuple[object, ...]:
    """Sorts `forward-b1-s32` before `forward-b1-s128`."""
    return tuple((1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d+)", program))


def _times(figures: object) -> tuple[str, ...]:
    match figures:
        case {"time": {"latency_ns": float() | int() as latency, "bound_by": str(bound)} as time}:
            bound = str(time.get("limited_by") or bound)
        case _:
            return ("-",) * 6
    milliseconds = latency / 1e6
    match figures:
        case {"this_program": {"ms": float() as whole}}:
            milliseconds = whole
    return f"{milliseconds:.2f} ms", bound, *_traffic(figures)


def _traffic(figures: object) -> Iterator[str]:
    match figures:
        case {"hbm": {"moved_bytes": int(moved), "ratio": float() | int() as ratio}}:
            yield from (human_bytes(moved), f"{ratio:.2f} x")
        case _:
            yield from ("-", "-")
    match figures:
        case {"spilled": {"bytes": int(spilled)}}:
            yield human_bytes(spilled)
        case _:
            yield "-"
    match figures:
        case {"tensor_engine": {"utilisation": float() | int() as share}}:
            yield f"{share:.0%}"
        case _:
            yield "-"


def _accuracy(outputs: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """The worst cosine and the largest relative error of the outputs."""
    if not outputs:
        return "-", "-"
    cosine = min((row["cosine"] for row in outputs), key=float)
    return cosine, max((row["max_relative"] for row in outputs), key=float)


def _aws(figures: object) -> str:
    match figures:
        case {"aws_compiler": {"in_short": str(time)}}:
            return time
        case _:
            return "-"
