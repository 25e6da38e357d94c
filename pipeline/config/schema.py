"""The base of all tables, the markers on their types, and the introspection of pydantic's models.

A `Form` is a value type: one parser, and one text of the allowed values. Faults (after "expected"), the reference page
and the JSON Schema all show that text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeAlias, TypeGuard, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# The path of a key in the document, as in ("models", 1, "buckets", 2).
KeyPath: TypeAlias = tuple[str | int, ...]

RULE = "rule"  # the type of pydantic errors that carry their own text


def refuse(allowed: str, *, found: str | None = None) -> PydanticCustomError:
    """The error of a validator: a well-formed value that breaks a rule; `allowed` is the text after "expected"."""
    return PydanticCustomError(RULE, "{allowed}", {"allowed": allowed, "found": found})


@dataclass(frozen=True)
class Form:
    """One kind of value: `read` converts a TOML value or raises ValueError, `write` converts it back."""

    allowed: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda value: value
    schema: Mapping[str, Any] = field(default_factory=dict, hash=False)
    choices: tuple[str, ...] = ()

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        serialization = core_schema.plain_serializer_function_ser_schema(self.write, when_used="json-unless-none")
        return core_schema.no_info_plain_validator_function(self.read, serialization=serialization)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.schema)


def text(pattern: str, allowed: str, *, longest: int = 255) -> Form:
    """Text that matches the whole pattern. Patterns are compiled on first use, not at import."""

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
    """The names in TOML's quotes: one of "a", "b", "c"."""
    quoted = [f'"{name}"' for name in names]
    return quoted[0] if len(quoted) == 1 else f"one of {', '.join(quoted)}"


@dataclass(frozen=True)
class Unit:
    """The unit of a number."""

    name: str


@dataclass(frozen=True)
class Absent:
    """The meaning of an optional key that is not set."""

    meaning: str


@dataclass(frozen=True)
class ListRule:
    """A rule on a whole list, in addition to the rules of its items."""

    allowed: str
    holds: Callable[[tuple[Any, ...]], bool]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.holds(items):
            raise ValueError
        return items


TAG: Final = "kind"  # the discriminator of a table with several variants


class Table(BaseModel):
    # Strict, because `tp = true` is a mistake and not a 1. Deferred, so that a command builds only the schemas it uses.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


@dataclass(frozen=True)
class Kind:
    """The declared type of a key, without `Annotated` and `| None`."""

    annotation: Any
    metadata: tuple[Any, ...] = ()

    def of(self, marker: type) -> Any:
        """The marker of that class, or None."""
        return next((item for item in self.metadata if isinstance(item, marker)), None)

    @property
    def variants(self) -> dict[str, type[Table]]:
        """The variants of a table, by the value of its tag."""
        shapes = get_args(self.annotation) if get_origin(self.annotation) in (Union, UnionType) else ()
        return {tag_of(shape): shape for shape in shapes if is_table(shape)}

    @property
    def item(self) -> "Kind | None":
        """The type of a list's items."""
        return kind_of(get_args(self.annotation)[0]) if get_origin(self.annotation) is tuple else None

    @property
    def named(self) -> "tuple[Kind, Kind] | None":
        """The types of the names and of the tables of a mapping, such as `[channels.NAME]`."""
        if get_origin(self.annotation) is not dict:
            return None
        name, table = get_args(self.annotation)
        return kind_of(name), kind_of(table)

    @property
    def is_scalar(self) -> bool:
        return self.item is None and not self.named and not self.variants and not is_table(self.annotation)


_Table = TypeVar("_Table")


class NamedTables(dict[str, _Table]):
    """The tables of a mapping by name, such as `[channels.NAME]`. They do not change, so a configuration has a hash."""

    def __hash__(self) -> int:  # type: ignore[override]  # that of dict is None
        return hash(frozenset(self.items()))


def is_table(annotation: Any) -> TypeGuard[type[Table]]:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def tag_of(table: type[Table]) -> str:
    tag: str = get_args(table.model_fields[TAG].annotation)[0]
    return tag


def kind_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> Kind:
    """Strip `Annotated` and `| None` from a type and collect the metadata."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return kind_of(inner, (*metadata, *_flattened(extra)))
    if get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation):
        arguments = tuple(argument for argument in get_args(annotation) if argument is not NoneType)
        inner = Union[arguments]  # noqa: UP007 - computed
        return kind_of(inner, metadata)
    return Kind(annotation, metadata)


def field_kind(field: FieldInfo) -> Kind:
    return kind_of(field.annotation, tuple(field.metadata))


def _flattened(metadata: list[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else (item,)


@dataclass(frozen=True)
class Place:
    """The place of an error: its key, the key's type, and the enclosing table."""

    path: KeyPath
    kind: Kind | None  # None: there is no such key
    table: type[Table] | None = None
    siblings: tuple[type[Table], ...] = ()  # the other variants of the table


_OF_NAME: Final = "[key]"  # pydantic's step from a table of a mapping to its name


def walk(root: type[Table], location: KeyPath) -> Place:
    """Resolve a location of a pydantic error, in which the tag of a variant is a step like a key."""
    place, name = Place((), Kind(root)), None
    for step in location:
        kind = place.kind
        assert kind is not None, "pydantic reports no location inside an unknown key"
        if step == _OF_NAME and name is not None:
            place = replace(place, kind=name)
        elif kind.named:
            name, table = kind.named
            place = Place((*place.path, step), table, place.table)
            continue
        elif step in kind.variants:
            others = tuple(shape for tag, shape in kind.variants.items() if tag != step)
            place = replace(place, kind=Kind(kind.variants[str(step)]), siblings=others)
        elif is_table(kind.annotation):
            field = kind.annotation.model_fields.get(str(step))
            inner = field_kind(field) if field else None
            place = Place((*place.path, step), inner, kind.annotation, () if field else place.siblings)
        else:
            place = Place((*place.path, step), kind.item, place.table)
        name = None
    return place
