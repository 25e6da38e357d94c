"""Environment variables that stand in for keys of the file: NXPIPE_STORE_URL for [store] url."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from nxpipe.pipeline.config.faults import Fault, KeyPath
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.table import Kind, Table, field_kind, is_table
from nxpipe.pipeline.config.wording import shown
from nxpipe.pipeline.util.suggest import nearest

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
