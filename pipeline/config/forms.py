"""How a value is written in the file: each kind of value has one reader, and one text that names what is allowed.

The text is what a fault says after "expected", what the reference page prints and what stands in the JSON Schema's
description, so that no two of them can disagree.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

RULE = "rule"  # the type of the errors that bring their own sentence


def refuse(allowed: str, *, found: str | None = None) -> PydanticCustomError:
    """What a validator raises for a value that is well formed and still cannot be: `allowed` says what could."""
    return PydanticCustomError(RULE, "{allowed}", {"allowed": allowed, "found": found})


@dataclass(frozen=True)
class Form:
    """One kind of value: `read` turns what TOML gives into what the program uses, or raises ValueError."""

    allowed: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)
    choices: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        as_in_the_file = core_schema.plain_serializer_function_ser_schema(self.write, when_used="json-unless-none")
        return core_schema.no_info_plain_validator_function(self.read, serialization=as_in_the_file)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.schema)


def text(pattern: str, allowed: str, *, longest: int = 255) -> Form:
    """Text that matches a pattern as a whole. Patterns are compiled when used: start-up pays for none of them."""

    def read(value: object) -> str:
        if not isinstance(value, str) or len(value) > longest or not re.fullmatch(pattern, value):
            raise ValueError
        return value

    return Form(allowed, read, schema={"type": "string", "pattern": f"^(?:{pattern})$", "maxLength": longest})


def one_of(names: Iterable[str]) -> Form:
    """One of the names of a catalogue."""
    choices = tuple(names)

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError
        return value

    return Form(listed(choices), read, schema={"type": "string", "enum": list(choices)}, choices=choices)


def listed(names: Iterable[str]) -> str:
    """The names as the file would write them: one of "a", "b", "c"."""
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else f"one of {', '.join(quoted)}"


@dataclass(frozen=True)
class Unit:
    """What a number counts."""

    name: str


@dataclass(frozen=True)
class Absent:
    """What holds when an optional key is not set."""

    meaning: str


@dataclass(frozen=True)
class ListRule:
    """A rule about a list as a whole, beyond what each item must be."""

    allowed: str
    holds: Callable[[tuple[Any, ...]], bool]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.holds(items):
            raise ValueError
        return items
