"""Puts defaults in the place of parameters and decides conditions by them, so that rules read plain values."""

from collections.abc import Mapping
from typing import Any, Final

from nxpipe.stacks.reading.template import intrinsic

_NOTHING: Final = {"Ref": "AWS::NoValue"}


def settle(document: Mapping[str, Any]) -> dict[str, Any]:
    """What would be deployed by someone who changes no parameter."""
    return _Settling(document).all()


class _Settling:
    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._conditions: Mapping[str, Any] = document.get("Conditions") or {}
        self._defaults = {
            name: _typed(parameter["Default"], str(parameter.get("Type")))
            for name, parameter in (document.get("Parameters") or {}).items()
            if "Default" in parameter and "SSM" not in str(parameter.get("Type"))
        }

    def all(self) -> dict[str, Any]:
        resources = {
            id_: self.value(body)
            for id_, body in (self._document.get("Resources") or {}).items()
            if isinstance(body, Mapping) and self._holds(body.get("Condition")) is not False
        }
        outputs = {name: self.value(body) for name, body in (self._document.get("Outputs") or {}).items()}
        return {**self._document, "Resources": resources, "Outputs": outputs}

    def value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [settled for each in value if (settled := self.value(each)) != _NOTHING]
        name, inner = intrinsic(value)
        if name == "Ref" and inner in self._defaults:
            return self._defaults[inner]
        if name == "Fn::If" and isinstance(inner, list):
            holds = self._holds(inner[0])
            return value if holds is None else self.value(inner[1] if holds else inner[2])
        if isinstance(value, Mapping):
            settled = {key: self.value(each) for key, each in value.items()}
            return {key: each for key, each in settled.items() if each != _NOTHING or key == "Ref"}
        return value

    def _holds(self, condition: object) -> bool | None:
        """None when only the deployment knows."""
        if condition is None:
            return True
        if isinstance(condition, str):
            return self._decide(self._conditions.get(condition))
        return self._decide(condition)

    def _decide(self, condition: object) -> bool | None:
        if isinstance(condition, Mapping) and "Condition" in condition:
            return self._holds(condition["Condition"])
        name, inner = intrinsic(condition)
        if name == "Fn::Equals":
            one, other = map(self.value, inner)
            return None if intrinsic(one)[0] or intrinsic(other)[0] else str(one) == str(other)
        if name == "Fn::Not":
            holds = self._decide(inner[0])
            return None if holds is None else not holds
        if name in ("Fn::And", "Fn::Or"):
            decisive = name == "Fn::Or"
            answers = [self._decide(each) for each in inner]
            if decisive in answers:
                return decisive
            return None if None in answers else not decisive
        return None


def _typed(default: Any, kind: str) -> Any:
    """A list's default is written as text with commas."""
    if kind == "CommaDelimitedList" or kind.startswith("List<"):
        return [each.strip() for each in str(default).split(",")]
    return default
