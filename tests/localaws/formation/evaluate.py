"""Evaluation of a template's intrinsic functions, with its parameters and the resources created so far."""

import base64
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tests.localaws.formation.faults import Invalid, Refused
from tests.localaws.formation.template import Template

_NO_VALUE: Final = object()
_IN_TEXT: Final = re.compile(r"\$\{(!?)([^}]+)\}")
_DYNAMIC: Final = re.compile(r"\{\{resolve:([a-z-]+):([^}]+)\}\}")


class KnownResource(Protocol):
    """A resource that exists."""

    @property
    def physical(self) -> str: ...

    def attribute(self, name: str) -> Any: ...


@dataclass(frozen=True)
class StackContext:
    """The context of a stack: account, region, and values from other stacks."""

    account: str
    region: str
    partition: str
    stack_name: str
    stack_id: str
    zones: Callable[[str], list[str]]
    imported: Callable[[str], str]  # returns the value of an export
    output: Callable[[str, str, str | None], str]  # returns an output of another stack: stack name, output name, region
    parameter: Callable[[str], str]  # returns a parameter of Systems Manager

    @property
    def pseudo(self) -> dict[str, Any]:
        return {
            "AWS::AccountId": self.account,
            "AWS::NoValue": _NO_VALUE,
            "AWS::NotificationARNs": [],
            "AWS::Partition": self.partition,
            "AWS::Region": self.region,
            "AWS::StackId": self.stack_id,
            "AWS::StackName": self.stack_name,
            "AWS::URLSuffix": "amazonaws.com",
        }


def check(template: Template) -> None:
    """Raise for each error that is visible before evaluation."""
    for resource in template.resources.values():
        for name in sorted(resource.needs):
            if name not in {*template.resources, *template.parameters} and not name.startswith("AWS::"):
                raise Invalid(f"Template format error: Unresolved resource dependencies [{name}] in {resource.logical}")
        for name in _functions_in(resource.properties):
            if name not in _FUNCTIONS:
                raise Invalid(f"Template error: {name} is not supported, in {resource.logical}")


def _functions_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for entry in value:
            yield from _functions_in(entry)
    elif isinstance(value, dict):
        yield from (name for name in value if name.startswith("Fn::") and len(value) == 1)
        yield from _functions_in(list(value.values()))


class Evaluation:
    """An evaluation; `existing` grows while resources are created, and `unknown` gives the value of a resource not yet
    created."""

    def __init__(
        self,
        template: Template,
        parameter_values: Mapping[str, str],
        context: StackContext,
        existing: Mapping[str, KnownResource],
        unknown: Callable[[str], Any] | None = None,
    ) -> None:
        self._template, self._context, self._existing, self._unknown = template, context, existing, unknown
        self._values = {
            name: self._parameter(name, parameter, parameter_values) for name, parameter in template.parameters.items()
        }
        if extra := sorted(set(parameter_values) - set(template.parameters)):
            raise Invalid(f"Parameters: {extra} do not exist in the template")
        self._conditions: dict[str, bool] = {}
        self._check_rules()

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def holds(self, condition: str) -> bool:
        if condition not in self._conditions:
            if condition not in self._template.conditions:
                raise Invalid(f"Template format error: Unresolved condition dependency {condition}")
            self._conditions[condition] = bool(self(self._template.conditions[condition]))
        return self._conditions[condition]

    def __call__(self, value: Any) -> Any:
        result = self._value(value)
        return None if result is _NO_VALUE else result

    # Values

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [entry for entry in map(self._value, value) if entry is not _NO_VALUE]
        if isinstance(value, str):
            return _DYNAMIC.sub(self._dynamic, value)
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (name, inner), *_ = value.items()
            if name == "Ref" or name.startswith("Fn::") or (name == "Condition" and isinstance(inner, str)):
                return self._function(name, inner)
        result = {name: self._value(inner) for name, inner in value.items()}
        return {name: item for name, item in result.items() if item is not _NO_VALUE}

    def _function(self, name: str, inner: Any) -> Any:
        function = _FUNCTIONS.get(name)
        if function is None:
            raise Invalid(f"Template error: {name} is not supported")
        return function(self, inner)

    def _dynamic(self, match: re.Match[str]) -> str:
        service, name = match.groups()
        if service != "ssm":
            raise Refused(f"dynamic references to {service} are not supported")
        return self._context.parameter(name.split(":")[0])

    def _parameter(self, name: str, declaration: Mapping[str, Any], parameter_values: Mapping[str, str]) -> Any:
        value = parameter_values.get(name, declaration.get("Default"))
        if value is None:
            raise Invalid(f"Parameters: [{name}] must have values")
        allowed = declaration.get("AllowedValues")
        if allowed and str(value) not in map(str, allowed):
            raise Invalid(f"Parameter '{name}' must be one of AllowedValues")
        kind = declaration["Type"]
        if kind.startswith("AWS::SSM::Parameter::Value<"):
            value = self._context.parameter(str(value))
        return (
            [part.strip() for part in str(value).split(",")]
            if "List<" in kind or kind == "CommaDelimitedList"
            else str(value)
        )

    def _check_rules(self) -> None:
        for rule in self._template.rules.values():
            if "RuleCondition" in rule and not self(rule["RuleCondition"]):
                continue
            for assertion in rule["Assertions"]:
                if not self(assertion["Assert"]):
                    raise Invalid(
                        f"Template validation error: {assertion.get('AssertDescription', assertion['Assert'])}"
                    )

    # Functions

    def _ref(self, name: str) -> Any:
        if name in self._context.pseudo:
            return self._context.pseudo[name]
        if name in self._values:
            return self._values[name]
        return self._resource(name, lambda resource: resource.physical)

    def _get_att(self, inner: Any) -> Any:
        name, attribute = inner if isinstance(inner, list) else inner.split(".", 1)
        return self._resource(name, lambda one: one.attribute(self(attribute)))

    def _resource(self, name: str, read: Callable[[KnownResource], Any]) -> Any:
        if name in self._existing:
            return read(self._existing[name])
        if name not in self._template.resources:
            raise Invalid(f"Template format error: Unresolved resource dependencies [{name}]")
        if self._unknown is None:
            raise Refused(f"{name} does not exist")
        return self._unknown(name)

    def _sub(self, inner: Any) -> str:
        text, own = inner if isinstance(inner, list) else (inner, {})

        def part(match: re.Match[str]) -> str:
            literal, name = match.groups()
            if literal:
                return "${" + name + "}"
            if name in own:
                return _text(self(own[name]))
            return _text(self._get_att(name) if "." in name else self._ref(name))

        return _IN_TEXT.sub(part, text)

    def _join(self, inner: Any) -> str:
        between, parts = inner
        return _text(self(between)).join(_text(entry) for entry in self(parts))

    def _select(self, inner: Any) -> Any:
        number, parts = int(self(inner[0])), self(inner[1])
        if not 0 <= number < len(parts):
            raise Invalid(f"Template error: Fn::Select cannot select nonexistent value at index {number}")
        return parts[number]

    def _split(self, inner: Any) -> list[str]:
        parts: list[str] = _text(self(inner[1])).split(inner[0])
        return parts

    def _if(self, inner: Any) -> Any:
        return self._value(inner[1] if self.holds(inner[0]) else inner[2])

    def _find(self, inner: Any) -> Any:
        table, *keys = (self(entry) for entry in inner[:3])
        try:
            return self._template.mappings[table][keys[0]][keys[1]]
        except KeyError as error:
            raise Invalid(f"Template error: Unable to get mapping for {table}::{keys[0]}::{keys[1]}") from error

    def _cidr(self, inner: Any) -> list[str]:
        block, count, bits = (self(entry) for entry in (*inner, 8)[:3])
        network = ipaddress.ip_network(block)
        subnets = network.subnets(new_prefix=network.max_prefixlen - int(bits))
        return [str(next(subnets)) for _ in range(int(count))]

    def _output(self, inner: Any) -> str:
        result = self(inner)
        return self._context.output(result["StackName"], result["OutputName"], result.get("Region"))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict) or value is None:
        raise Invalid("Template error: every Fn::Join or Fn::Sub object must consist of strings")
    return str(value)


_FUNCTIONS: Final[dict[str, Callable[[Evaluation, Any], Any]]] = {
    "Condition": lambda at, inner: at.holds(inner),
    "Fn::And": lambda at, inner: all(at(entry) for entry in inner),
    "Fn::Base64": lambda at, inner: base64.b64encode(_text(at(inner)).encode()).decode(),
    "Fn::Cidr": Evaluation._cidr,
    "Fn::Contains": lambda at, inner: at(inner[1]) in at(inner[0]),
    "Fn::Equals": lambda at, inner: _text(at(inner[0])) == _text(at(inner[1])),
    "Fn::FindInMap": Evaluation._find,
    "Fn::GetAZs": lambda at, inner: at._context.zones(at(inner) or at._context.region),
    "Fn::GetAtt": Evaluation._get_att,
    "Fn::GetStackOutput": Evaluation._output,
    "Fn::If": Evaluation._if,
    "Fn::ImportValue": lambda at, inner: at._context.imported(_text(at(inner))),
    "Fn::Join": Evaluation._join,
    "Fn::Not": lambda at, inner: not at(inner[0]),
    "Fn::Or": lambda at, inner: any(at(entry) for entry in inner),
    "Fn::Select": Evaluation._select,
    "Fn::Split": Evaluation._split,
    "Fn::Sub": Evaluation._sub,
    "Ref": Evaluation._ref,
}
