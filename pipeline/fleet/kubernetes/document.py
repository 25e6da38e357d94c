"""YAML, as far as objects of Kubernetes need it: the same object is the same bytes, whatever library is installed."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

Value: TypeAlias = "str | int | bool | Sequence[Value] | Mapping[str, Value]"
Object: TypeAlias = Mapping[str, Value]

# What no reader takes for a number, a truth value or nothing.
_PLAIN: Final = re.compile(r"[A-Za-z_/](?::?[A-Za-z0-9_./@-])*")
_NOT_TEXT: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
_LINES: Final = re.compile(r"[!-~][ -~]*\n(?:[ -~]*\n)*")


def written(objects: Sequence[Object]) -> str:
    """One document for each, keys in the order that they were given."""
    return "".join("---\n" + "\n".join(_lines(each, "")) + "\n" for each in objects)


def _lines(value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _entry(f"{indent}{_text(key)}:", each, indent + "  ")
    else:
        assert isinstance(value, Sequence), "scalars stand beside their key"
        for each in value:
            if isinstance(each, Mapping) and each:
                first, *rest = _lines(each, indent + "  ")
                yield f"{indent}- {first.lstrip(' ')}"
                yield from rest
            else:
                yield from _entry(f"{indent}-", each, indent + "  ")


def _entry(head: str, value: Value, indent: str) -> Iterator[str]:
    if isinstance(value, str) and _LINES.fullmatch(value) and not value.endswith("\n\n"):
        yield f"{head} |"
        yield from (f"{indent}{line}".rstrip() if not line else f"{indent}{line}" for line in value[:-1].split("\n"))
    elif isinstance(value, str | int):
        yield f"{head} {_scalar(value)}"
    elif value:
        yield head
        yield from _lines(value, indent)
    else:
        yield f"{head} {'{}' if isinstance(value, Mapping) else '[]'}"


def _scalar(value: str | int) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return f'"{"".join(map(_character, value))}"'


def _character(one: str) -> str:
    if one in '"\\':
        return f"\\{one}"
    if one.isprintable():
        return one
    return f"\\u{ord(one):04x}" if ord(one) < 0x10000 else f"\\U{ord(one):08x}"
