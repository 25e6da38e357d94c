"""Environment variables that stand in for keys of the file: NXPIPE_STORE_URL for [store] url."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from nxpipe.pipeline.config import load
from nxpipe.pipeline.config.crosschecks import Tables, cross_check, salvage
from nxpipe.pipeline.config.faults import ConfigInvalid, Fault, Finding, KeyPath
from nxpipe.pipeline.config.messages import findings, key_text, shown
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.schema import Kind, Table, field_kind, is_table
from nxpipe.pipeline.config.toml_file import read_document
from nxpipe.pipeline.util.text import nearest

FILE: Final = "environment"  # what a fault names in place of a file
_WHOLE: Final = "[+-]?[0-9]{1,40}"
_FRACTION: Final = "[+-]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+)?"


@cache
def settable() -> Mapping[str, tuple[KeyPath, Kind]]:
    """Every variable that stands for a key: those of single values in tables that a file has once."""
    return {f"NXPIPE_{'_'.join(path).upper()}": (path, kind) for path, kind in _single_values(Config, ())}


def _single_values(table: type[Table], parents: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Kind]]:
    for name, field in table.model_fields.items():
        kind = field_kind(field)
        if is_table(kind.annotation):
            yield from _single_values(kind.annotation, (*parents, name))
        elif kind.is_scalar and parents:
            yield (*parents, name), kind


def variables(environ: Mapping[str, str]) -> dict[KeyPath, str]:
    """The keys that the environment sets, and by which variable. An empty one is unset: CI systems leave such."""
    return {settable()[name][0]: name for name, value in environ.items() if value and name in settable()}


def unknown_variables(environ: Mapping[str, str]) -> Iterator[Fault]:
    """Variables that begin like ours and stand for nothing; those that begin otherwise are somebody else's."""
    sections = {name.split("_")[1] for name in settable()}
    for name in sorted(environ):
        words = name.split("_")
        if (
            words[0] != "NXPIPE"
            or len(words) < 3
            or words[1] not in sections
            or name in settable()
            or not environ[name]
        ):
            continue
        allowed = f"a variable for a single value of [{words[1].lower()}]: {', '.join(_of_section(words[1]))}"
        yield Fault(FILE, None, name, shown(environ[name]), allowed, nearest(name, settable()))


def _of_section(section: str) -> list[str]:
    return [name for name in settable() if name.startswith(f"NXPIPE_{section}_")]


def overlaid(document: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The document with the environment's values in place; a section that is no table is left for its own fault."""
    merged = dict(document)
    for path, name in variables(environ).items():
        table: Any = merged
        for step in path[:-1]:
            inner = table.get(step, {})
            if not isinstance(inner, dict):
                break
            table[step] = table = dict(inner)
        else:
            table[path[-1]] = _value(environ[name], settable()[name][1])
    return merged


def _value(text: str, kind: Kind) -> object:
    """A number where the key takes one; every other text is judged as a string of the file would be."""
    if kind.annotation in (int, int | str) and re.fullmatch(_WHOLE, text):
        return int(text)
    if kind.annotation is float and re.fullmatch(_FRACTION, text):
        return float(text)
    return text


# Commands that need no file (a store can be listed without one) still need a project to speak of.
_WITHOUT_A_FILE: dict[str, Any] = {"project": {"name": "unnamed"}}


def load_config(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Config:
    """Read the file; `ConfigInvalid` names all of its faults. `missing_ok`: no file means the defaults."""
    return load(read_source(path, environ, missing_ok=missing_ok))


@dataclass(frozen=True)
class Source:
    """A document with the environment laid over it, and where each of its values came from."""

    file: str
    text: str
    document: dict[str, Any]
    environ: Mapping[str, str]

    @cached_property
    def lines(self) -> dict[KeyPath, int]:
        from nxpipe.pipeline.config.toml_file import locate  # nobody asks for the line of what is right

        return locate(self.text)

    @cached_property
    def variables(self) -> dict[KeyPath, str]:
        return load.variables(self.environ)

    def fault(self, finding: Finding) -> Fault:
        """Say where a finding stands."""
        variable = self.variables.get(finding.path)
        if variable is not None:
            return Fault(load.FILE, None, variable, finding.found, finding.allowed, finding.nearest)
        return Fault(
            self.file, self._line(finding.path), key_text(finding.path), finding.found, finding.allowed, finding.nearest
        )

    def _line(self, path: KeyPath) -> int | None:
        """The line of a key, or of the innermost table around it when the file does not have the key."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


def read_source(path: Path, environ: Mapping[str, str], *, missing_ok: bool = False) -> Source:
    absent = missing_ok and not path.exists()
    text, document = ("", _WITHOUT_A_FILE) if absent else read_document(path)
    return Source(str(path), text, load.overlaid(document, environ), environ)


def load(source: Source) -> Config:
    """Every table by itself, then the rules between them; what is wrong is told all at once."""
    faults = list(load.unknown_variables(source.environ))
    try:
        config = Config.model_validate(source.document)
    except ValidationError as error:
        faults += map(source.fault, findings(error, Config))
        faults += map(source.fault, cross_check(salvage(source.document)))
        raise ConfigInvalid(faults) from None
    faults += map(source.fault, cross_check(Tables.of(config)))
    if faults:
        raise ConfigInvalid(faults)
    return config


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a line of the file, a variable of the environment, or the default."""

    kind: Literal["file", "load", "default"]
    name: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.name is None:
            return self.kind
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True)
class Setting:
    """One key, its effective value as the file would write it (None: not set), and its origin."""

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
