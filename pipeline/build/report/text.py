"""Texts that every view of a build shares: durations, counts, escaped texts, and groups of cells in brace notation.

`forward-b{1,4}-s{128,256,512}` are six programs; each name can be read out of it.
"""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from nxpipe.pipeline.request import SAVED, Shape
from nxpipe.pipeline.util.escape import for_log


def plain(text: str) -> str:
    """A text of a model or an error as one line without control characters."""
    return for_log(" ".join(text.split()))


def duration(seconds: float) -> str:
    """0.4 s, 41 s, 3:07 min, 1:02:09 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} h"


def clock(seconds: float) -> str:
    """A duration in a column: 0:41, 1:02:09."""
    whole = int(seconds)
    hours = f"{whole // 3600}:{whole // 60 % 60:02}" if whole >= 3600 else str(whole // 60)
    return f"{hours}:{whole % 60:02}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


T = TypeVar("T")
_RANGE: Final = 4  # numbers in equal steps, from which on a range is shorter than a list


@dataclass(frozen=True)
class BraceGroup(Generic[T]):
    name: str
    members: tuple[T, ...]


def brace_groups(
    items: Iterable[T], shape: Callable[[T], Shape], alike: Callable[[T], Hashable]
) -> list[BraceGroup[T]]:
    """Groups of items that are alike and of one phase: full grids of batches and buckets, in the order of the items."""
    groups: dict[Hashable, dict[int, list[T]]] = {}
    for item in items:
        own = shape(item)
        groups.setdefault((alike(item), own.phase), {}).setdefault(own.batch, []).append(item)
    return [group for batches in groups.values() for group in _grids(batches, shape)]


def generalize(reasons: Sequence[tuple[str, Shape]]) -> list[str]:
    """Reasons with N for the bucket of their cell, so that equal ones can be grouped.

    A text that several buckets share is about none of them, even if it contains such a number.
    """
    about: dict[str, set[int]] = {}
    for text, shape in reasons:
        about.setdefault(text, set()).add(shape.sequence)
    return [text if len(about[text]) > 1 else _without(shape.sequence, text) for text, shape in reasons]


def _without(number: int, text: str) -> str:
    return re.sub(rf"(?<!\d)(?<!\d\.){number}(?!\.?\d)", "N", text)


def _grids(batches: dict[int, list[T]], shape: Callable[[T], Shape]) -> Iterable[BraceGroup[T]]:
    """Batches with the same buckets are one grid."""
    grids: dict[tuple[int, ...], list[int]] = {}
    for batch, items in batches.items():
        grids.setdefault(tuple(sorted(shape(item).sequence for item in items)), []).append(batch)
    for sequences, shared in grids.items():
        members = tuple(item for batch in shared for item in batches[batch])
        yield BraceGroup(_name(shape(members[0]).phase, sorted(shared), sequences), members)


def _name(phase: str, batches: Sequence[int], sequences: Sequence[int]) -> str:
    return phase if phase == SAVED else f"{phase}-b{_braced(batches)}-s{_braced(sequences)}"


def _braced(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) < _RANGE or len(steps) > 1:
        return f"{{{','.join(map(str, numbers))}}}"
    step = "" if steps == {1} else f"..{steps.pop()}"
    return f"{{{numbers[0]}..{numbers[-1]}{step}}}"
