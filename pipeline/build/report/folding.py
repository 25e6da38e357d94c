"""Many cells in few words: those that stand alike are named together, as a shell would expand the name.

`forward-b{1,4}-s{128,256,512}` are six programs. Nothing is lost: each name can be read out of it.
"""

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from nxpipe.pipeline.models.shapes import SAVED_PROGRAM, Shape

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
    return phase if phase == SAVED_PROGRAM else f"{phase}-b{_braced(batches)}-s{_braced(sequences)}"


def _braced(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    steps = {after - before for before, after in itertools.pairwise(numbers)}
    if len(numbers) < _STEPS or len(steps) > 1:
        return f"{{{','.join(map(str, numbers))}}}"
    step = "" if steps == {1} else f"..{steps.pop()}"
    return f"{{{numbers[0]}..{numbers[-1]}{step}}}"
