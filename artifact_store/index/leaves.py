"""Nested JSON as flat fields (path and value), for the comparison of two documents."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import InvalidDocument

MAX_CHARACTERS: Final = (
    32 * 1024**2
)  # paths repeat the names of their parents, so a small document may expand to huge fields

_PLAIN: Final = re.compile(r"[\w/:+@-]+")


@dataclass(frozen=True)
class Difference:
    """A field that differs, with its values as canonical JSON; None where a side lacks the field."""

    path: str
    before: str | None
    after: str | None


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Each field by its path, as in `options.autocast` or `outputs[0].cosine`; a list of plain values is one field.

    Different documents have different fields, because a name with special characters is quoted.
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
    fields: dict[str, str] = {}
    budget = MAX_CHARACTERS
    for path, value in leaves(dict(document)):
        fields[path] = canonical_json(value).decode()
        budget -= len(path) + len(fields[path])
        if budget < 0:
            raise InvalidDocument(f"its fields with their full paths have more than {MAX_CHARACTERS} characters")
    return fields


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[Difference, ...]:
    """Every field that differs, sorted by path."""
    old, new = fields_of(before), fields_of(after)
    paths = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    return tuple(Difference(path, old.get(path), new.get(path)) for path in paths)
