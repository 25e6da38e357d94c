"""What the fields mean, for people and editors: the help text, the JSON Schema, the reference page."""

from collections.abc import Iterator
from datetime import date
from typing import Any, Final

from pydantic.fields import FieldInfo

from nxpipe.pipeline.config.environment import settable
from nxpipe.pipeline.config.forms import Absent, Form
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.table import TAG, Kind, Table, field_kind, is_table
from nxpipe.pipeline.config.wording import allowed_text, shown


def field_help(table: type[Table], name: str) -> str:
    """What a field is for and what it may be: the one text of a field."""
    field = table.model_fields[name]
    kind = field_kind(field)
    is_value = not kind.variants and not is_table(kind.annotation) and (kind.item is None or kind.item.is_scalar)
    return f"{field.description} Allowed: {allowed_text(kind, name)}." if is_value else str(field.description)


def _default(field: FieldInfo, kind: Kind) -> str:
    """What holds when the key is not set."""
    absent, form = kind.of(Absent), kind.of(Form)
    if absent is not None:
        return str(absent.meaning)
    if field.is_required() or is_table(kind.annotation):
        return ""
    return _as_written(form.write(field.default) if form else field.default)


def _as_written(value: object) -> str:
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, date) else shown(value)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of nxpipe.toml, for editors."""
    schema: dict[str, Any] = _without_null(Config.model_json_schema())
    by_name = {table.__name__: table for _, _, table in tables(Config)}
    for name, definition in schema["$defs"].items():
        for key, about in definition["properties"].items():
            about["description"] = field_help(by_name[name], key)
            form = field_kind(by_name[name].model_fields[key]).of(Form)
            if form is not None and "default" in about:
                about["default"] = form.write(by_name[name].model_fields[key].default)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "nxpipe.toml"}


def _without_null(schema: Any) -> Any:
    """TOML has no null: a key that is not set is left out."""
    if isinstance(schema, list):
        return [_without_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _without_null(each) for key, each in schema.items() if not (key == "default" and each is None)}
    choices = kept.get("anyOf", [])
    if {"type": "null"} not in choices:
        return kept
    value = [each for each in choices if each != {"type": "null"}]
    rest = {key: each for key, each in kept.items() if key != "anyOf"}
    return {**value[0], **rest} if len(value) == 1 else {"anyOf": value, **rest}


_INTRODUCTION: Final = """\
# Configuration

Made from the models in `pipeline/config/` by `make docs`; change the texts there.

One file, `nxpipe.toml`, says what a project builds and where it runs. The command, the stacks and the fleets read the
same file. `nxpipe init` writes one, `nxpipe config check` says everything that is wrong with it, and
`nxpipe config show` prints every effective value and where it came from.

A value comes from the environment if the variable that is named below is set and not empty, else from the file, else
from the default. Tables and lists have no variable. `NXPIPE_CONFIG` names another file.

For completion and checks in an editor, write the schema down and name it in the first line of the file:

```console
$ nxpipe config schema > nxpipe.schema.json
```

```toml
#:schema ./nxpipe.schema.json
```

The least file:

```toml
[project]
name = "search"
```
"""


def configuration_page() -> str:
    """The text of docs/reference/configuration.md."""
    chapters = [_chapter(path, tag, table) for path, tag, table in tables(Config)]
    return "\n".join([_INTRODUCTION, *dict.fromkeys(chapters)])  # what two kinds of fleet share is explained once


def tables(table: type[Table], parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, type[Table]]]:
    """Every table below this one: its keys from the root, its tag if it has several shapes, and its type."""
    for key, field in table.model_fields.items():
        kind, path = field_kind(field), (*parents, key)
        kind = kind.item or kind
        shapes = kind.variants or ({"": kind.annotation} if is_table(kind.annotation) else {})
        for tag, shape in shapes.items():
            yield path, tag, shape
            yield from tables(shape, path)


def _chapter(path: tuple[str, ...], tag: str, table: type[Table]) -> str:
    is_array = len(path) == 1 and field_kind(Config.model_fields[path[0]]).item is not None
    header = f"[[{path[0]}]]" if is_array else f"[{path[0]}]" if len(path) == 1 else ".".join(path)
    shape = f" with `{TAG} = {shown(tag)}`" if tag else ""
    entries = "\n".join(_entry((*path, key), table) for key in table.model_fields)
    return f"{'#' * (len(path) + 1)} `{header}`{shape}\n\n{table.__doc__}\n\n{entries}\n"


def _entry(path: tuple[str, ...], table: type[Table]) -> str:
    key, field = path[-1], table.model_fields[path[-1]]
    default = _default(field, field_kind(field))
    example = _as_written(field.examples[0]) if field.examples else ""
    variable = next((name for name, (place, _) in settable().items() if place == path), "")
    sentences = (
        f"- **`{key}`**{' (required)' if field.is_required() else ''}: {field_help(table, key)}",
        f"Default: {default}." if default and not field.is_required() else "",
        f"Example: {example}." if example != default and example else "",
        f"Variable: `{variable}`." if variable else "",
    )
    return " ".join(filter(None, sentences))
