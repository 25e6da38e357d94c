"""The effective configuration, value by value, and where each value came from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nxpipe.pipeline.config.faults import KeyPath
from nxpipe.pipeline.config.load import Source, load, read_source
from nxpipe.pipeline.config.wording import key_text


@dataclass(frozen=True)
class Origin:
    """Where a value came from: a line of the file, a variable of the environment, or the default."""

    kind: Literal["file", "environment", "default"]
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
