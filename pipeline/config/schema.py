"""How a value is written in the file: each kind of value has one reader, and one text that names what is allowed.

The text is what a fault says after "expected", what the reference page prints and what stands in the JSON Schema's
description, so that no two of them can disagree.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeGuard, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from nxpipe.pipeline.config.faults import KeyPath

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


TAG: Final = "kind"  # the key that says which of several shapes a table has


class Table(BaseModel):
    # Strict, because `tp = true` is a mistake and not a 1. Built late, so that only what is used is paid for.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


@dataclass(frozen=True)
class Kind:
    """A type as its key declares it, without the wrapping."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    def of(self, marker: type) -> Any:
        """The annotation of that class, if the type has one."""
        return next((each for each in self.metadata if isinstance(each, marker)), None)

    @property
    def variants(self) -> dict[str, type[Table]]:
        """The shapes of a table that has several, by the value of its tag."""
        shapes = get_args(self.annotation) if get_origin(self.annotation) in (Union, UnionType) else ()
        return {tag_of(shape): shape for shape in shapes if is_table(shape)}

    @property
    def item(self) -> "Kind | None":
        """What a list is a list of."""
        return kind_of(get_args(self.annotation)[0]) if get_origin(self.annotation) is tuple else None

    @property
    def is_scalar(self) -> bool:
        return self.item is None and not self.variants and not is_table(self.annotation)


def is_table(annotation: Any) -> TypeGuard[type[Table]]:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def tag_of(table: type[Table]) -> str:
    tag: str = get_args(table.model_fields[TAG].annotation)[0]
    return tag


def kind_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
    """Take `Annotated` and `| None` off a type, keeping what they say."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return kind_of(inner, (*metadata, *_flattened(extra)))
    if get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation):
        inner = Union[tuple(each for each in get_args(annotation) if each is not NoneType)]  # noqa: UP007 - computed
        return kind_of(inner, metadata)
    return Kind(annotation, metadata)


def field_kind(field: FieldInfo) -> Kind:
    return kind_of(field.annotation, tuple(field.metadata))


def _flattened(metadata: list[Any]) -> Iterator[Any]:
    for each in metadata:
        yield from each.metadata if isinstance(each, FieldInfo) else (each,)


@dataclass(frozen=True)
class Place:
    """Where an error stands: its key, the type that the key has, and the table that it stands in."""

    path: KeyPath
    kind: Kind | None  # None: there is no such key
    table: type[Table] | None = None
    siblings: tuple[type[Table], ...] = ()  # the other shapes of the table, where it may have several


def walk(root: type[Table], location: KeyPath) -> Place:
    """Follow one of pydantic's locations, which names the chosen shapes as if they were keys."""
    place = Place((), Kind(root))
    for step in location:
        kind = place.kind
        assert kind is not None, "pydantic does not look inside a key that does not exist"
        if step in kind.variants:
            others = tuple(shape for tag, shape in kind.variants.items() if tag != step)
            place = replace(place, kind=Kind(kind.variants[str(step)]), siblings=others)
        elif is_table(kind.annotation):
            field = kind.annotation.model_fields.get(str(step))
            inner = field_kind(field) if field else None
            place = Place((*place.path, step), inner, kind.annotation, () if field else place.siblings)
        else:
            place = Place((*place.path, step), kind.item, place.table)
    return place
