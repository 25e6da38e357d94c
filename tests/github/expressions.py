"""GitHub's expressions, as far as our workflows use them; an unknown name is an error, not an empty string."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

Contexts: TypeAlias = Mapping[str, Any]

_TOKEN: Final = re.compile(r"\s*('(?:[^']|'')*'|\d+|[A-Za-z_][\w-]*|==|!=|&&|\|\||[!().,\[\]])")
_EMBEDDED: Final = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_STATUS: Final = re.compile(r"\b(always|cancelled|failure|success)\(")
_LITERALS: Final = {"true": True, "false": False, "null": None}


def filled(text: str, contexts: Contexts, workspace: Path) -> Any:
    """The text with its expressions evaluated; a text that is a single expression keeps its type."""
    whole = _EMBEDDED.fullmatch(text.strip())
    if whole:
        return evaluate(whole[1], contexts, workspace)
    return _EMBEDDED.sub(lambda found: as_text(evaluate(found[1], contexts, workspace)), text)


def holds(condition: str | None, contexts: Contexts, workspace: Path, *, well: bool) -> bool:
    """The value of an `if`; without a status function it requires that all earlier steps succeeded."""
    if condition is None:
        return well
    inner = _EMBEDDED.fullmatch(condition.strip())
    result = evaluate(inner[1] if inner else condition, {**contexts, "well": well}, workspace)
    return bool(result) and (well or _STATUS.search(condition) is not None)


def as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    assert isinstance(value, str | int), f"GitHub would write {value!r} as a mere 'Object' or 'Array'"
    return str(value)


def evaluate(text: str, contexts: Contexts, workspace: Path) -> Any:
    parser = _Parser(_tokens(text), contexts, _functions(contexts, workspace))
    value = parser.either()
    assert parser.next is None, f"{text!r}: {parser.next!r} was not expected"
    return value


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while text[at:].strip():
        token = _TOKEN.match(text, at)
        assert token, f"{text!r}: what is {text[at:]!r}?"
        found.append(token[1])
        at = token.end()
    return found


def _functions(contexts: Contexts, workspace: Path) -> Mapping[str, Callable[..., Any]]:
    return {
        "fromJSON": json.loads,
        "format": lambda pattern, *values: pattern.format(*map(as_text, values)),
        "hashFiles": lambda *names: _digest(workspace, names),
        "always": lambda: True,
        "cancelled": lambda: False,
        "success": lambda: contexts["well"],
        "failure": lambda: not contexts["well"],
    }


def _digest(workspace: Path, names: tuple[str, ...]) -> str:
    files = sorted(file for name in names for file in workspace.glob(name))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else ""


@dataclass
class _Parser:
    tokens: list[str]
    contexts: Contexts
    functions: Mapping[str, Callable[..., Any]]

    @property
    def next(self) -> str | None:
        return self.tokens[0] if self.tokens else None

    def _take(self, *wanted: str) -> str | None:
        return self.tokens.pop(0) if self.next in wanted else None

    def _insist(self, wanted: str) -> None:
        assert self._take(wanted), f"{wanted!r} was expected, not {self.next!r}"

    def either(self) -> Any:
        value = self._both()
        while self._take("||"):
            other = self._both()
            value = value or other
        return value

    def _both(self) -> Any:
        value = self._compared()
        while self._take("&&"):
            other = self._compared()
            value = value and other
        return value

    def _compared(self) -> Any:
        value = self._one()
        while operator := self._take("==", "!="):
            value = _equal(value, self._one()) == (operator == "==")
        return value

    def _one(self) -> Any:
        if self._take("!"):
            return not self._one()
        if self._take("("):
            value = self.either()
            self._insist(")")
            return value
        assert self.next, "the expression ends too early"
        token = self.tokens.pop(0)
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if token.isdigit():
            return int(token)
        if token in _LITERALS:
            return _LITERALS[token]
        return self._called(token) if self.next == "(" else self._found(token)

    def _called(self, name: str) -> Any:
        self._insist("(")
        arguments = []
        while not self._take(")"):
            arguments.append(self.either())
            self._take(",")
        return self.functions[name](*arguments)

    def _found(self, name: str) -> Any:
        """An absent member of a context is null."""
        value = self.contexts[name]
        while self._take("."):
            value = (value or {}).get(self.tokens.pop(0))
        return value


def _equal(one: Any, other: Any) -> bool:
    """Comparison without regard to case; values of different types are compared as numbers."""
    if isinstance(one, str) and isinstance(other, str):
        return one.lower() == other.lower()
    return _number(one) == _number(other) if type(one) is not type(other) else bool(one == other)


def _number(value: Any) -> float:
    if value is None or value == "":
        return 0.0
    return float(value) if not isinstance(value, str) or value.isdigit() else float("nan")
