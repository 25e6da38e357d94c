"""Words that every view of a build shares: lengths of time, counts, and texts that strangers wrote."""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from nxpipe.pipeline.request import SAVED, Shape
from nxpipe.pipeline.util.escape import for_log


def plain(text: str) -> str:
    """A foreign text of several lines as one, harmless in a log and on a terminal."""
    return for_log(" ".join(text.split()))


def duration(seconds: float) -> str:
    """As people read it: 0.4 s, 41 s, 3:07 min, 1:02:09 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02} h"


def clock(seconds: float) -> str:
    """The same in a column: 0:41, 1:02:09."""
    whole = int(seconds)
    hours = f"{whole // 3600}:{whole // 60 % 60:02}" if whole >= 3600 else str(whole // 60)
    return f"{hours}:{whole % 60:02}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


T = TypeVar("T")
_STEPS: Final = 4  # numbers in equal steps from which on the steps are shorter to read than the numbers


@dataclass(frozen=True)
class Fold(Generic[T]):
    name: str
    members: tuple[T, ...]


def folds(items: Iterable[T], shape: Callable[[T], Shape], alike: Callable[[T], Hashable]) -> list[Fold[T]]:
    """Those that are alike and of one phase, a full grid of batches and buckets at a time, in the order they came."""
    groups: dict[Hashable, dict[int, list[T]]] = {}
    for item in items:
        one = shape(item)
        groups.setdefault((alike(item), one.phase), {}).setdefault(one.batch, []).append(item)
    return [fold for batches in groups.values() for fold in _grids(batches, shape)]


def in_general(said: Sequence[tuple[str, Shape]]) -> list[str]:
    """Reasons that name the bucket they are about, as they read for every bucket; N stands for it.

    What is said of several buckets in the same words is about none of them, whatever numbers it names.
    """
    about: dict[str, set[int]] = {}
    for text, shape in said:
        about.setdefault(text, set()).add(shape.sequence)
    return [text if len(about[text]) > 1 else _without(shape.sequence, text) for text, shape in said]


def _without(number: int, text: str) -> str:
    return re.sub(rf"(?<!\d)(?<!\d\.){number}(?!\.?\d)", "N", text)


def _grids(batches: dict[int, list[T]], shape: Callable[[T], Shape]) -> Iterable[Fold[T]]:
    """Batches that have the same buckets go together."""
    grids: dict[tuple[int, ...], list[int]] = {}
    for batch, items in batches.items():
        grids.setdefault(tuple(sorted(shape(item).sequence for item in items)), []).append(batch)
    for sequences, sharing in grids.items():
        members = tuple(item for batch in sharing for item in batches[batch])
        yield Fold(_name(shape(members[0]).phase, sorted(sharing), sequences), members)


def _name(phase: str, batches: Sequence[int], sequences: Sequence[int]) -> str:
    return phase if phase == SAVED else f"{phase}-b{_braced(batches)}-s{_braced(sequences)}"


def _braced(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) < _STEPS or len(steps) > 1:
        return f"{{{','.join(map(str, numbers))}}}"
    step = "" if steps == {1} else f"..{steps.pop()}"
    return f"{{{numbers[0]}..{numbers[-1]}{step}}}"
