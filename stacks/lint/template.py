"""Synthesized templates: resources by type, references resolved across stacks, defaults of parameters applied."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

Properties: TypeAlias = Mapping[str, Any]

PUBLISHED: Final = "/nxpipe/"  # names in Parameter Store of values that stacks pass on
_RETAINING: Final = ("Retain", "RetainExceptOnCreate", "Snapshot")


@dataclass(frozen=True)
class Resource:
    """One resource of a template."""

    stack: str
    region: str | None
    id: str
    type: str
    path: str  # of the construct, or STACK/LOGICAL_ID in a template that CDK did not write
    properties: Properties = field(repr=False)
    kept: bool = False  # True if retained at replacement and at deletion of its stack
    metadata: Properties = field(default_factory=dict, repr=False)

    @property
    def key(self) -> tuple[str, str]:
        return self.stack, self.id


@dataclass(frozen=True)
class Template:
    """The template of one stack, with parameters and conditions resolved by their defaults."""

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
                metadata=body.get("Metadata") or {},
                kept=all(str(body.get(policy)) in _RETAINING for policy in ("DeletionPolicy", "UpdateReplacePolicy")),
            )
            for id_, body in (self.document.get("Resources") or {}).items()
        }

    def _path(self, id_: str, body: Mapping[str, Any]) -> str:
        path = (body.get("Metadata") or {}).get("aws:cdk:path")
        return self.paths.get(id_) or str(path or f"{self.stack}/{id_}")

    @property
    def outputs(self) -> Mapping[str, Any]:
        return self.document.get("Outputs") or {}

    @cached_property
    def stored_parameters(self) -> Mapping[str, str]:
        """Names in Parameter Store by parameter of the template; a change set reads their values."""
        return {
            id_: str(parameter["Default"])
            for id_, parameter in (self.document.get("Parameters") or {}).items()
            if str(parameter.get("Type")).startswith("AWS::SSM::Parameter::Value<") and "Default" in parameter
        }


@dataclass(frozen=True)
class Templates:
    """All templates that are deployed together."""

    all: tuple[Template, ...]

    def of(self, *types: str) -> Iterator[Resource]:
        for template in self.all:
            yield from (resource for resource in template.resources.values() if resource.type in types)

    def follow(self, value: object, at: Resource) -> Resource | None:
        """The resource that a value references, by Ref, GetAtt, an output of another stack, or an import."""
        return self._follow(value, at.stack, frozenset())

    def same(self, first: tuple[object, Resource], second: tuple[object, Resource]) -> bool:
        """True if two values, each with the resource that has it, reference the same resource or are equal."""
        left, right = self.follow(*first), self.follow(*second)
        if left is not None or right is not None:
            return left is not None and right is not None and left.key == right.key
        return first[0] == second[0]

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

    @cached_property
    def _published(self) -> Mapping[str, tuple[str, Any]]:
        """Stack and value of parameters in Parameter Store, by name."""
        return {
            str(parameter.properties["Name"]): (parameter.stack, parameter.properties.get("Value"))
            for parameter in self.of("AWS::SSM::Parameter")
            if "Name" in parameter.properties
        }

    def _follow(self, value: object, stack: str, seen: frozenset[str]) -> Resource | None:
        if (other := self._elsewhere(value, stack)) is not None:
            step = f"{stack} {value}"
            return None if step in seen else self._follow(other[1], other[0], seen | {step})
        name, inner = intrinsic(value)
        template = self._by_stack.get(stack)
        if name in ("Ref", "Fn::GetAtt") and template is not None:
            return template.resources.get(attribute_of(inner)[0] if name == "Fn::GetAtt" else str(inner))
        return None

    def _elsewhere(self, value: object, stack: str) -> tuple[str, Any] | None:
        """Stack and value that a reference reads: an output, an export, or a parameter in Parameter Store."""
        name, inner = intrinsic(value)
        if name == "Fn::GetStackOutput":
            exporter, output = str(inner.get("StackName")), str(inner.get("OutputName"))
            other = self._by_stack.get(exporter)
            return (exporter, other.outputs[output].get("Value")) if other and output in other.outputs else None
        if name == "Fn::ImportValue" and isinstance(inner, str):
            return self._exports.get(inner)
        template = self._by_stack.get(stack)
        if name == "Ref" and template is not None:
            return self._published.get(template.stored_parameters.get(str(inner), ""))
        return None

    def uses_elsewhere(self, resource: Resource) -> Iterator[tuple[Resource, str, bool]]:
        """Resources of other stacks that read a resource: the resource, its property, and whether it imports."""
        for template in self.all:
            for user in template.resources.values() if template.stack != resource.stack else ():
                for key, value in user.properties.items():
                    for reference in _references(value):
                        target = self.follow(reference, user)
                        if target is not None and target.key == resource.key:
                            yield user, key, "Fn::ImportValue" in reference

    def with_origins(self, resource: Resource) -> Properties:
        """The properties of a resource, with what references to other stacks read in place of the references.

        Two that differ only in the way they read the same value are equal.
        """
        result: Properties = self._with_origins(resource.properties, resource.stack, frozenset())
        return result

    def _with_origins(self, value: Any, stack: str, seen: frozenset[str]) -> Any:
        other = self._elsewhere(value, stack)
        step = f"{stack} {value}" if other is not None else ""
        if other is not None and step not in seen:
            return {_ORIGIN: [other[0], self._with_origins(other[1], other[0], seen | {step})]}
        if isinstance(value, Mapping):
            return {key: self._with_origins(item, stack, seen) for key, item in value.items()}
        if isinstance(value, list):
            return [self._with_origins(item, stack, seen) for item in value]
        return value


_ORIGIN: Final = "nxpipe::Origin"  # the stack, and the value there


def intrinsic(value: object) -> tuple[str, Any]:
    """Name and argument of an intrinsic function; an empty name for any other value."""
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, inner),) = value.items()
        if name == "Ref" or str(name).startswith("Fn::"):
            return str(name), inner
    return "", None


def _references(value: object) -> Iterator[Properties]:
    """The references in a value that may read another stack."""
    if isinstance(value, Mapping) and intrinsic(value)[0] in ("Fn::GetStackOutput", "Fn::ImportValue", "Ref"):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _references(item)


def attribute_of(inner: object) -> tuple[str, str]:
    """Logical id and attribute of a GetAtt, which is a list or a string with a dot."""
    if isinstance(inner, str):
        id_, _, attribute = inner.partition(".")
        return id_, attribute
    assert isinstance(inner, list)
    return str(inner[0]), str(inner[1])


def text(value: object) -> str:
    """The text of a value, with ${...} for parts known at deployment."""
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
    """A value as a list: CloudFormation accepts a single item in place of many lists."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def settings(properties: Properties, key: str) -> Properties:
    """A property that is a table; empty if it is absent or known at deployment only."""
    value = properties.get(key)
    return value if isinstance(value, Mapping) and not intrinsic(value)[0] else {}


def tables(properties: Properties, key: str) -> list[Properties]:
    """A property that is a list of tables, without items known at deployment only."""
    return [item for item in listed(properties.get(key)) if isinstance(item, Mapping) and not intrinsic(item)[0]]


def is_true(value: object) -> bool:
    """True for a boolean true and for the text "true"."""
    return value is True or str(value).lower() == "true"


_NO_VALUE: Final = {"Ref": "AWS::NoValue"}


def settle(document: Mapping[str, Any]) -> dict[str, Any]:
    """A template with all parameters at their defaults, and conditions resolved as far as possible."""
    return _Resolver(document).all()


class _Resolver:
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
            return [resolved for item in value if (resolved := self.value(item)) != _NO_VALUE]
        name, inner = intrinsic(value)
        if name == "Ref" and inner in self._defaults:
            return self._defaults[inner]
        if name == "Fn::If" and isinstance(inner, list):
            holds = self._holds(inner[0])
            return value if holds is None else self.value(inner[1] if holds else inner[2])
        if isinstance(value, Mapping):
            resolved = {key: self.value(item) for key, item in value.items()}
            return {key: item for key, item in resolved.items() if item != _NO_VALUE or key == "Ref"}
        return value

    def _holds(self, condition: object) -> bool | None:
        """The truth of a condition; None if it is known at deployment only."""
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
            left, right = map(self.value, inner)
            return None if intrinsic(left)[0] or intrinsic(right)[0] else str(left) == str(right)
        if name == "Fn::Not":
            holds = self._decide(inner[0])
            return None if holds is None else not holds
        if name in ("Fn::And", "Fn::Or"):
            decisive = name == "Fn::Or"
            operands = [self._decide(operand) for operand in inner]
            if decisive in operands:
                return decisive
            return None if None in operands else not decisive
        return None


def _typed(default: Any, kind: str) -> Any:
    """The default of a parameter; that of a list is text with commas."""
    if kind == "CommaDelimitedList" or kind.startswith("List<"):
        return [item.strip() for item in str(default).split(",")]
    return default


_TEMPLATE: Final = ".template.json"


def construct_paths(template: Path) -> Mapping[str, str]:
    """Construct paths by logical id, from CDK's metadata file beside a template; empty if there is none."""
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
    """The template of a stack, with all parameters at their defaults."""
    return Template(stack, settle(document), region, paths or {})
