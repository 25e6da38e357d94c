"""Nested JSON as flat fields, path and value, so that two documents can be compared."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import InvalidDocument

MAX_CHARACTERS: Final = 32 * 1024**2  # paths repeat their parents' names: a small document may have huge fields

_PLAIN: Final = re.compile(r"[\w/:+@-]+")


@dataclass(frozen=True)
class Difference:
    """A field that is not the same on both sides, with canonical JSON of its values; None where a side lacks it."""

    path: str
    before: str | None
    after: str | None


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Each field by its path, as in `options.autocast` or `outputs[0].cosine`; a list of plain values is one field.

    No two documents have the same fields: a name that is no plain word is quoted.
    """
    if isinstance(value, dict) and value:
        for name, child in value.items():
            word = name if _PLAIN.fullmatch(name) else json.dumps(name)
            yield from leaves(child, f"{path}.{word}" if path else word)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from leaves(item, f"{path}[{number}]")
    else:
        yield path, value


def fields_of(document: Mapping[str, object]) -> dict[str, str]:
    """Each field's value as canonical JSON."""
    found: dict[str, str] = {}
    room = MAX_CHARACTERS
    for path, value in leaves(dict(document)):
        found[path] = canonical_json(value).decode()
        room -= len(path) + len(found[path])
        if room < 0:
            raise InvalidDocument(
                f"its fields, written out with their paths, take more than {MAX_CHARACTERS} characters"
            )
    return found


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[Difference, ...]:
    """Every field that is not the same, by path."""
    old, new = fields_of(before), fields_of(after)
    paths = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    return tuple(Difference(path, old.get(path), new.get(path)) for path in paths)
