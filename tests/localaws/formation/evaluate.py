"""Working out a template's functions: an evaluation knows the parameters, and the resources as far as they are made."""

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


class Known(Protocol):
    """A resource that exists."""

    @property
    def physical(self) -> str: ...

    def attribute(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Surroundings:
    """What is outside of the stack: its place, and what others have made known."""

    account: str
    region: str
    partition: str
    stack_name: str
    stack_id: str
    zones: Callable[[str], list[str]]
    imported: Callable[[str], str]  # the value of an export
    output: Callable[[str, str, str | None], str]  # of another stack: its name, the output's, a region
    parameter: Callable[[str], str]  # of Systems Manager

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
    """Whatever can be seen to be wrong before anything is worked out."""
    for one in template.resources.values():
        for name in sorted(one.needs):
            if name not in {*template.resources, *template.parameters} and not name.startswith("AWS::"):
                raise Invalid(f"Template format error: Unresolved resource dependencies [{name}] in {one.logical}")
        for name in _functions_in(one.properties):
            if name not in _FUNCTIONS:
                raise Invalid(f"Template error: {name} is not supported, in {one.logical}")


def _functions_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from _functions_in(each)
    elif isinstance(value, dict):
        yield from (name for name in value if name.startswith("Fn::") and len(value) == 1)
        yield from _functions_in(list(value.values()))


class Evaluation:
    """`made` grows while resources are made; what is not there yet is asked of `unknown`."""

    def __init__(
        self,
        template: Template,
        given: Mapping[str, str],
        around: Surroundings,
        made: Mapping[str, Known],
        unknown: Callable[[str], Any] | None = None,
    ) -> None:
        self._template, self._around, self._made, self._unknown = template, around, made, unknown
        self._values = {name: self._parameter(name, one, given) for name, one in template.parameters.items()}
        if extra := sorted(set(given) - set(template.parameters)):
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
        found = self._value(value)
        return None if found is _NO_VALUE else found

    # Values

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [each for each in map(self._value, value) if each is not _NO_VALUE]
        if isinstance(value, str):
            return _DYNAMIC.sub(self._dynamic, value)
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (name, inner), *_ = value.items()
            if name == "Ref" or name.startswith("Fn::") or (name == "Condition" and isinstance(inner, str)):
                return self._function(name, inner)
        found = {name: self._value(inner) for name, inner in value.items()}
        return {name: each for name, each in found.items() if each is not _NO_VALUE}

    def _function(self, name: str, inner: Any) -> Any:
        function = _FUNCTIONS.get(name)
        if function is None:
            raise Invalid(f"Template error: {name} is not supported")
        return function(self, inner)

    def _dynamic(self, found: re.Match[str]) -> str:
        service, name = found.groups()
        if service != "ssm":
            raise Refused(f"dynamic references to {service} are not supported")
        return self._around.parameter(name.split(":")[0])

    def _parameter(self, name: str, one: Mapping[str, Any], given: Mapping[str, str]) -> Any:
        value = given.get(name, one.get("Default"))
        if value is None:
            raise Invalid(f"Parameters: [{name}] must have values")
        allowed = one.get("AllowedValues")
        if allowed and str(value) not in map(str, allowed):
            raise Invalid(f"Parameter '{name}' must be one of AllowedValues")
        kind = one["Type"]
        if kind.startswith("AWS::SSM::Parameter::Value<"):
            value = self._around.parameter(str(value))
        return (
            [part.strip() for part in str(value).split(",")]
            if "List<" in kind or kind == "CommaDelimitedList"
            else str(value)
        )

    def _check_rules(self) -> None:
        for rule in self._template.rules.values():
            if "RuleCondition" in rule and not self(rule["RuleCondition"]):
                continue
            for each in rule["Assertions"]:
                if not self(each["Assert"]):
                    raise Invalid(f"Template validation error: {each.get('AssertDescription', each['Assert'])}")

    # Functions

    def _ref(self, name: str) -> Any:
        if name in self._around.pseudo:
            return self._around.pseudo[name]
        if name in self._values:
            return self._values[name]
        return self._resource(name, lambda one: one.physical)

    def _get_att(self, inner: Any) -> Any:
        name, attribute = inner if isinstance(inner, list) else inner.split(".", 1)
        return self._resource(name, lambda one: one.attribute(self(attribute)))

    def _resource(self, name: str, read: Callable[[Known], Any]) -> Any:
        if name in self._made:
            return read(self._made[name])
        if name not in self._template.resources:
            raise Invalid(f"Template format error: Unresolved resource dependencies [{name}]")
        if self._unknown is None:
            raise Refused(f"{name} does not exist")
        return self._unknown(name)

    def _sub(self, inner: Any) -> str:
        text, own = inner if isinstance(inner, list) else (inner, {})

        def part(found: re.Match[str]) -> str:
            literal, name = found.groups()
            if literal:
                return "${" + name + "}"
            if name in own:
                return _text(self(own[name]))
            return _text(self._get_att(name) if "." in name else self._ref(name))

        return _IN_TEXT.sub(part, text)

    def _join(self, inner: Any) -> str:
        between, parts = inner
        return _text(self(between)).join(_text(each) for each in self(parts))

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
        table, *keys = (self(each) for each in inner[:3])
        try:
            return self._template.mappings[table][keys[0]][keys[1]]
        except KeyError as error:
            raise Invalid(f"Template error: Unable to get mapping for {table}::{keys[0]}::{keys[1]}") from error

    def _cidr(self, inner: Any) -> list[str]:
        block, count, bits = (self(each) for each in (*inner, 8)[:3])
        network = ipaddress.ip_network(block)
        subnets = network.subnets(new_prefix=network.max_prefixlen - int(bits))
        return [str(next(subnets)) for _ in range(int(count))]

    def _output(self, inner: Any) -> str:
        found = self(inner)
        return self._around.output(found["StackName"], found["OutputName"], found.get("Region"))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict) or value is None:
        raise Invalid("Template error: every Fn::Join or Fn::Sub object must consist of strings")
    return str(value)


_FUNCTIONS: Final[dict[str, Callable[[Evaluation, Any], Any]]] = {
    "Condition": lambda at, inner: at.holds(inner),
    "Fn::And": lambda at, inner: all(at(each) for each in inner),
    "Fn::Base64": lambda at, inner: base64.b64encode(_text(at(inner)).encode()).decode(),
    "Fn::Cidr": Evaluation._cidr,
    "Fn::Contains": lambda at, inner: at(inner[1]) in at(inner[0]),
    "Fn::Equals": lambda at, inner: _text(at(inner[0])) == _text(at(inner[1])),
    "Fn::FindInMap": Evaluation._find,
    "Fn::GetAZs": lambda at, inner: at._around.zones(at(inner) or at._around.region),
    "Fn::GetAtt": Evaluation._get_att,
    "Fn::GetStackOutput": Evaluation._output,
    "Fn::If": Evaluation._if,
    "Fn::ImportValue": lambda at, inner: at._around.imported(_text(at(inner))),
    "Fn::Join": Evaluation._join,
    "Fn::Not": lambda at, inner: not at(inner[0]),
    "Fn::Or": lambda at, inner: any(at(each) for each in inner),
    "Fn::Select": Evaluation._select,
    "Fn::Split": Evaluation._split,
    "Fn::Sub": Evaluation._sub,
    "Ref": Evaluation._ref,
}
