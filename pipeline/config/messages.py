"""Faults of a configuration: file and line, the value found, the values allowed, the nearest valid spelling; and their
texts, from pydantic's errors and the declared types."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nxpipe.pipeline.config.schema import (
    RULE,
    TAG,
    Form,
    KeyPath,
    Kind,
    ListRule,
    Place,
    Table,
    Unit,
    is_table,
    listed,
    tag_of,
    walk,
)
from nxpipe.pipeline.util.text import nearest

_LONGEST = 60
_BARE = "[A-Za-z0-9_-]+"


@dataclass(frozen=True)
class Violation:
    """A broken rule: the key, the value found and the values allowed, without file and line."""

    path: KeyPath
    found: str
    allowed: str
    nearest: str | None = None


@dataclass(frozen=True)
class Fault:
    """A violation with its file and line; `str` gives one line: place, found, expected."""

    file: str
    line: int | None
    key: str
    found: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        subject = f"{place}: {self.key}" if self.key else place
        guess = f'; did you mean "{self.nearest}"?' if self.nearest else ""
        return f"{subject}: found {self.found}; expected {self.allowed}{guess}"


class NoConfiguration(Fault):
    """There is no file: the first sentence that a new user reads."""

    def __str__(self) -> str:
        return f"{self.file} does not exist; write one with `nxpipe init`, or pass --config PATH (cdk: -c config=PATH)"


class ConfigInvalid(Exception):
    """An invalid configuration, with all of its faults in the order of the file."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(faults, key=lambda fault: (fault.line is None, fault.line or 0)))
        self.lines = tuple(map(str, self.faults))
        super().__init__("\n".join(self.lines))


def key_text(path: KeyPath) -> str:
    """The path of a key as text: models[1].buckets[2]."""
    words: list[str] = []
    for step in path:
        if isinstance(step, int):
            words.append(f"[{step}]")
        else:
            words.append(f"{'.' if words else ''}{step if re.fullmatch(_BARE, step) else _quoted(step)}")
    return "".join(words)


def shown(value: object) -> str:
    """A value in TOML's notation, truncated if it is long."""
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"a whole number of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        return _shown_list(value)
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, date | datetime | time):
        return f"the date or time {value.isoformat()}"
    return str(value)


def _shown_list(items: list[Any] | tuple[Any, ...]) -> str:
    if not items:
        return "an empty list"
    texts = ["[...]" if isinstance(item, list | tuple) else shown(item) for item in items[:8]]
    text = ", ".join(texts)
    return f"[{text}]" if len(items) <= 8 and len(text) <= _LONGEST else f"[{text[:_LONGEST]} ...]"


def _quoted(text: str) -> str:
    cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return json.dumps(cut, ensure_ascii=not cut.isprintable())


def allowed_text(kind: Kind, name: str = "") -> str:
    """The values that a type allows, as text after "expected"."""
    text = _allowed_without_unit(kind, name)
    unit = kind.of(Unit)
    return f"{text} ({unit.name})" if unit else text


def _allowed_without_unit(kind: Kind, name: str) -> str:
    form = kind.of(Form)
    if form is not None:
        return str(form.allowed)
    if get_origin(kind.annotation) is Literal:
        return listed(get_args(kind.annotation))
    if kind.variants:
        return f"a table whose {TAG} is {listed(kind.variants)}"
    if kind.named:
        return f"tables headed [{name}.NAME]"
    if is_table(kind.annotation):
        required = [key for key, field in kind.annotation.model_fields.items() if field.is_required()]
        return f"a table that sets {' and '.join(required)}" if required else "a table"
    if kind.item is not None:
        return _allowed_list(kind, kind.item, name)
    if kind.annotation is bool:
        return "true or false"
    if kind.annotation is datetime:
        return "a date and time with its offset, such as 2026-11-01T09:00:00Z"
    return f"{'a whole number' if kind.annotation is int else 'a number'}{_bounds(kind)}"


def _allowed_list(kind: Kind, item: Kind, name: str) -> str:
    if item.variants or is_table(item.annotation):
        return f"an array of tables, each headed [[{name}]]"
    least, most, rule = kind.of(MinLen), kind.of(MaxLen), kind.of(ListRule)
    if most and most.max_length == 1:
        return f"a list of one item, {allowed_text(item)}"
    count = f"{least.min_length if least else 0} to {most.max_length}" if most else "any number of"
    return f"a list of {count} items{f' {rule.allowed}' if rule else ''}, each {allowed_text(item)}"


def _bounds(kind: Kind) -> str:
    least, most = kind.of(Ge), kind.of(Le)
    if least and most:
        return f" from {least.ge} to {most.le}"
    words = {Ge: "at least {0.ge}", Gt: "above {0.gt}", Le: "at most {0.le}", Lt: "below {0.lt}"}
    bounds = [words[type(bound)].format(bound) for bound in kind.metadata if type(bound) in words]
    return f" {' and '.join(bounds)}" if bounds else ""


def choices_of(kind: Kind) -> tuple[str, ...]:
    """The valid values of an enumeration, for spelling suggestions; empty for other types."""
    form = kind.of(Form)
    if form is not None:
        return tuple(form.choices)
    return tuple(get_args(kind.annotation)) if get_origin(kind.annotation) is Literal else ()


def violations(error: ValidationError, root: type[Table]) -> Iterator[Violation]:
    """One violation for each pydantic error that no other error causes."""
    for details in error.errors(include_url=False):
        if not _is_consequence(details):
            yield _violation(details, walk(root, details["loc"]))


def _is_consequence(details: ErrorDetails) -> bool:
    """True if another error causes this one: a default computed from a faulty key, a list without its faulty items."""
    if details["type"] == "too_short":
        return bool(len(details["input"]) >= details["ctx"]["min_length"])
    return details["type"] == "default_factory_not_called"


def _violation(details: ErrorDetails, place: Place) -> Violation:
    value, kind = details["input"], place.kind
    if kind is None:
        return _unknown_key(place)
    if details["type"] == RULE:
        rule = details["ctx"]
        return Violation(place.path, rule["found"] or shown(value), rule["allowed"])
    allowed = allowed_text(kind, ".".join(step for step in place.path if isinstance(step, str)))
    if details["type"] == "missing":
        return Violation(place.path, "nothing", allowed)
    if kind.variants and isinstance(value, dict):
        return _wrong_tag(value, place, kind)
    return Violation(place.path, shown(value), allowed, _guess(value, choices_of(kind)))


def _wrong_tag(value: dict[str, Any], place: Place, kind: Kind) -> Violation:
    tag = value.get(TAG)
    tag_text = "nothing" if TAG not in value else shown(tag)
    return Violation((*place.path, TAG), tag_text, listed(kind.variants), _guess(tag, tuple(kind.variants)))


def _unknown_key(place: Place) -> Violation:
    table, key = place.table, place.path[-1]
    assert table is not None, "only a table has unknown keys"
    known = tuple(table.model_fields)
    other_tags = [tag_of(shape) for shape in place.siblings if key in shape.model_fields]
    if other_tags:
        allowed = f'a key of {TAG} = "{tag_of(table)}": {", ".join(known)}'
        return Violation(place.path, f"a key of {TAG} = {listed(other_tags)} only", allowed)
    noun = "section" if len(place.path) == 1 else "key"
    allowed = f"one of {', '.join(known)}"
    return Violation(place.path, f"an unknown {noun}", allowed, _guess(key, known))


def _guess(value: object, choices: tuple[str, ...]) -> str | None:
    return nearest(value, choices) if isinstance(value, str) and choices else None
