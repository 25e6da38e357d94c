"""The effective configuration: nxpipe.toml, overridden by NXPIPE_* variables; all of its faults; each value's origin.

A variable stands for one key: NXPIPE_STORE_URL for [store] url. Loading never stops at the first fault: pydantic checks
every table by itself, the cross-checks run on the tables that are valid, and `ConfigInvalid` holds all violations.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from nxpipe.pipeline.config.crosschecks import Tables, cross_check, valid_tables
from nxpipe.pipeline.config.faults import ConfigInvalid, Fault, KeyPath, Violation
from nxpipe.pipeline.config.messages import key_text, shown, violations
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.schema import Kind, Table, field_kind, is_table
from nxpipe.pipeline.config.toml_file import locate, read_document
from nxpipe.pipeline.util.text import nearest

ENVIRONMENT: Final = "environment"  # stands in a fault where a file name would
_INTEGER: Final = "[+-]?[0-9]{1,40}"
_FLOAT: Final = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"


@cache
def settable() -> Mapping[str, tuple[KeyPath, Kind]]:
    """Every variable and its key: the scalar keys of the tables that occur once."""
    return {f"NXPIPE_{'_'.join(path).upper()}": (path, kind) for path, kind in _scalar_keys(Config, ())}


def _scalar_keys(table: type[Table], parents: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Kind]]:
    for name, field in table.model_fields.items():
        kind = field_kind(field)
        if is_table(kind.annotation):
            yield from _scalar_keys(kind.annotation, (*parents, name))
        elif kind.is_scalar and parents:
            yield (*parents, name), kind


def set_variables(environ: Mapping[str, str]) -> dict[KeyPath, str]:
    """The variable that sets each key. An empty variable counts as unset, because CI systems leave such."""
    return {settable()[name][0]: name for name, value in environ.items() if value and name in settable()}


def unknown_variables(environ: Mapping[str, str]) -> Iterator[Fault]:
    """Variables that begin with NXPIPE_ and the name of a table, and set no key of it."""
    sections = {name.split("_")[1] for name in settable()}
    for name, value in sorted(environ.items()):
        prefix, *rest = name.split("_")
        if prefix != "NXPIPE" or len(rest) < 2 or rest[0] not in sections or name in settable() or not value:
            continue
        known = [each for each in settable() if each.startswith(f"NXPIPE_{rest[0]}_")]
        allowed = f"a variable for a scalar key of [{rest[0].lower()}]: {', '.join(known)}"
        yield Fault(ENVIRONMENT, None, name, shown(value), allowed, nearest(name, settable()))


def override(document: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The document with the environment's values in place; a section that is not a table keeps its own fault."""
    merged = dict(document)
    for path, name in set_variables(environ).items():
        table: Any = merged
        for step in path[:-1]:
            inner = table.get(step, {})
            if not isinstance(inner, dict):
                break
            table[step] = table = dict(inner)
        else:
            table[path[-1]] = _typed(environ[name], settable()[name][1])
    return merged


def _typed(text: str, kind: Kind) -> object:
    """A number where the key takes one; any other text is validated like a string of the file."""
    if kind.annotation in (int, int | str) and re.fullmatch(_INTEGER, text):
        return int(text)
    if kind.annotation is float and re.fullmatch(_FLOAT, text):
        return float(text)
    return text


# A command that runs without a file (`store ls`, for one) still needs a project name.
_DEFAULT_DOCUMENT: Final[dict[str, Any]] = {"project": {"name": "unnamed"}}


def load_config(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Config:
    """Read the file; `ConfigInvalid` holds all of its faults. `missing_ok`: a missing file means the defaults."""
    return load(read_source(path, environ, missing_ok=missing_ok))


@dataclass(frozen=True)
class Source:
    """The document with the environment's values in place, and the origin of each value."""

    file: str
    text: str
    document: dict[str, Any]
    environ: Mapping[str, str]

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        return locate(self.text)

    @cached_property
    def variables(self) -> dict[KeyPath, str]:
        return set_variables(self.environ)

    def fault(self, violation: Violation) -> Fault:
        """The violation with its file and line, or with its variable."""
        variable = self.variables.get(violation.path)
        file, line, key = self.file, self._line(violation.path), key_text(violation.path)
        if variable is not None:
            file, line, key = ENVIRONMENT, None, variable
        return Fault(file, line, key, violation.found, violation.allowed, violation.nearest)

    def _line(self, path: KeyPath) -> int | None:
        """The line of a key; of the innermost enclosing table if the file lacks the key."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_source(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Source:
    absent = missing_ok and not path.exists()
    text, document = ("", _DEFAULT_DOCUMENT) if absent else read_document(path)
    return Source(str(path), text, override(document, environ), environ)


def load(source: Source) -> Config:
    """Check every table, then the rules between tables; raise all faults at once."""
    faults = list(unknown_variables(source.environ))
    try:
        config = Config.model_validate(source.document)
    except ValidationError as error:
        faults += map(source.fault, violations(error, Config))
        faults += map(source.fault, cross_check(valid_tables(source.document)))
        raise ConfigInvalid(faults) from None
    faults += map(source.fault, cross_check(Tables.of(config)))
    if faults:
        raise ConfigInvalid(faults)
    return config


@dataclass(frozen=True)
class Origin:
    """The source of a value: a line of the file, an environment variable, or the default."""

    kind: Literal["file", "environment", "default"]
    name: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.name is None:
            return self.kind
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True)
class Setting:
    """One key, its effective value in TOML's types (None: not set), and its origin."""

    key: str
    value: object
    origin: Origin


def origins(path: Path, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    """Every effective value of a valid configuration."""
    source = read_source(path, environ)
    values = load(source).model_dump(mode="json")
    return tuple(Setting(key_text(key), value, _origin(source, key)) for key, value in _leaves(values, ()))


def _leaves(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _origin(source: Source, path: KeyPath) -> Origin:
    if path in source.variables:
        return Origin("environment", source.variables[path])
    if path in source.lines:
        return Origin("file", source.file, source.lines[path])
    return Origin("default")
