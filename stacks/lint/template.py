"""Synthesised templates as rules read them: resources by type, references resolved across stacks, defaults applied."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

Properties: TypeAlias = Mapping[str, Any]

_KEEPING: Final = ("Retain", "RetainExceptOnCreate", "Snapshot")


@dataclass(frozen=True)
class Resource:
    """One resource of a template."""

    stack: str
    region: str | None
    id: str
    type: str
    path: str  # the construct's, or the stack and the logical id of a template that CDK did not make
    properties: Properties = field(repr=False)
    kept: bool = False  # when it is replaced, and when its stack is deleted

    @property
    def key(self) -> tuple[str, str]:
        return self.stack, self.id


@dataclass(frozen=True)
class Template:
    """The template of one stack, after its parameters' defaults and conditions have been put in."""

    stack: str
    document: Mapping[str, Any] = field(repr=False)
    region: str | None = None
    paths: Mapping[str, str] = field(default_factory=dict, repr=False)  # of constructs, by logical id

    @cached_property
    def resources(self) -> Mapping[str, Resource]:
        return {
            id_: Resource(
                stack=self.stack,
                region=self.region,
                id=id_,
                type=str(body.get("Type", "")),
                path=self._path(id_, body),
                properties=body.get("Properties") or {},
                kept=all(str(body.get(policy)) in _KEEPING for policy in ("DeletionPolicy", "UpdateReplacePolicy")),
            )
            for id_, body in (self.document.get("Resources") or {}).items()
        }

    def _path(self, id_: str, body: Mapping[str, Any]) -> str:
        told = (body.get("Metadata") or {}).get("aws:cdk:path")
        return self.paths.get(id_) or str(told or f"{self.stack}/{id_}")

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self.document.get("Outputs") or {}


@dataclass(frozen=True)
class Templates:
    """All templates that are deployed together."""

    all: tuple[Template, ...]

    def of(self, *types: str) -> Iterator[Resource]:
        for template in self.all:
            yield from (each for each in template.resources.values() if each.type in types)

    def follow(self, value: object, at: Resource) -> Resource | None:
        """The resource that a value speaks of: by Ref or attribute, an output of another stack, or an import."""
        return self._follow(value, at.stack, frozenset())

    def same(self, one: tuple[object, Resource], other: tuple[object, Resource]) -> bool:
        """Whether two values, each read at a resource, mean the same thing."""
        first, second = self.follow(*one), self.follow(*other)
        if first is not None or second is not None:
            return first is not None and second is not None and first.key == second.key
        return one[0] == other[0]

    @cached_property
    def _by_stack(self) -> Mapping[str, Template]:
        return {template.stack: template for template in self.all}

    @cached_property
    def _exports(self) -> Mapping[str, tuple[str, Any]]:
        return {
            output["Export"]["Name"]: (template.stack, output.get("Value"))
            for template in self.all
            for output in template.outputs.values()
            if isinstance(output.get("Export", {}).get("Name"), str)
        }

    def _follow(self, value: object, stack: str, seen: frozenset[tuple[str, str]]) -> Resource | None:
        name, inner = intrinsic(value)
        template = self._by_stack.get(stack)
        if name in ("Ref", "Fn::GetAtt") and template is not None:
            return template.resources.get(attribute_of(inner)[0] if name == "Fn::GetAtt" else str(inner))
        if name == "Fn::GetStackOutput":
            there, output = str(inner.get("StackName")), str(inner.get("OutputName"))
            other = self._by_stack.get(there)
            if other is None or output not in other.outputs or (there, output) in seen:
                return None
            return self._follow(other.outputs[output].get("Value"), there, seen | {(there, output)})
        if name == "Fn::ImportValue" and isinstance(inner, str) and inner in self._exports and ("", inner) not in seen:
            there, exported = self._exports[inner]
            return self._follow(exported, there, seen | {("", inner)})
        return None


def intrinsic(value: object) -> tuple[str, Any]:
    """The function that a value calls, and what with; an empty name for what calls none."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, inner),) = value.items()
        if name == "Ref" or str(name).startswith("Fn::"):
            return str(name), inner
    return "", None


def attribute_of(inner: object) -> tuple[str, str]:
    """The logical id and the attribute of a GetAtt, which is written as a list or with a dot."""
    if isinstance(inner, str):
        id_, _, attribute = inner.partition(".")
        return id_, attribute
    assert isinstance(inner, list)
    return str(inner[0]), str(inner[1])


def text(value: object) -> str:
    """A value as a pattern would see it, with ${...} for what only the deployment knows."""
    name, inner = intrinsic(value)
    if name == "Fn::Join":
        return str(inner[0]).join(map(text, inner[1])) if isinstance(inner[1], list) else "${...}"
    if name == "Fn::Sub":
        return str(inner if isinstance(inner, str) else inner[0])
    if name == "Fn::GetAtt":
        return "${" + ".".join(attribute_of(inner)) + "}"
    if name:
        return "${" + (str(inner) if isinstance(inner, str) else "...") + "}"
    return str(value)


def listed(value: object) -> list[Any]:
    """CloudFormation lets many a list of one be written without the list."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def settings(properties: Properties, key: str) -> Properties:
    """A property that is a table; an empty one if it is not there, or if only the deployment knows it."""
    value = properties.get(key)
    return value if isinstance(value, Mapping) and not intrinsic(value)[0] else {}


def tables(properties: Properties, key: str) -> list[Properties]:
    """A property that is a list of tables, without those that only the deployment knows."""
    return [each for each in listed(properties.get(key)) if isinstance(each, Mapping) and not intrinsic(each)[0]]


def is_true(value: object) -> bool:
    """Templates write booleans as such, and as text."""
    return value is True or str(value).lower() == "true"


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


_TEMPLATE: Final = ".template.json"


def construct_paths(template: Path) -> Mapping[str, str]:
    """By logical id, from what CDK writes beside a template; empty for a template that CDK did not write."""
    metadata = template.with_name(f"{template.name.removesuffix(_TEMPLATE)}.metadata.json")
    if not template.name.endswith(_TEMPLATE) or not metadata.is_file():
        return {}
    return {
        entry["data"]: path.removeprefix("/")
        for path, entries in json.loads(metadata.read_text()).items()
        for entry in entries
        if entry["type"] == "aws:cdk:logicalId"
    }


def read(
    stack: str, document: Mapping[str, Any], region: str | None = None, paths: Mapping[str, str] | None = None
) -> Template:
    """A template as someone would deploy it who changes no parameter."""
    return Template(stack, settle(document), region, paths or {})
