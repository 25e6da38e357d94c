"""A parsed template before evaluation."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from tests.localaws.formation.faults import Invalid

_PARTS: Final = {
    "AWSTemplateFormatVersion",
    "Conditions",
    "Description",
    "Mappings",
    "Metadata",
    "Outputs",
    "Parameters",
    "Resources",
    "Rules",
}
_OF_A_RESOURCE: Final = {
    "Condition",
    "CreationPolicy",
    "DeletionPolicy",
    "DependsOn",
    "Metadata",
    "Properties",
    "Type",
    "UpdatePolicy",
    "UpdateReplacePolicy",
}
_IN_TEXT: Final = re.compile(r"\$\{([^!}][^}]*)\}")


@dataclass(frozen=True)
class Declared:
    """One resource of a template."""

    logical: str
    type: str
    properties: Mapping[str, Any]
    condition: str | None
    after: tuple[str, ...]  # by DependsOn
    keep_on_delete: str
    keep_on_replace: str
    policies: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> set[str]:
        """The names of its references, those of its update policy included: alarms, for example."""
        return {*names_in(self.properties), *names_in(self.policies)}


@dataclass(frozen=True)
class Template:
    text: str
    parameters: Mapping[str, Mapping[str, Any]]
    mappings: Mapping[str, Any]
    conditions: Mapping[str, Any]
    rules: Mapping[str, Any]
    resources: Mapping[str, Declared]
    outputs: Mapping[str, Mapping[str, Any]]
    description: str | None = None

    @staticmethod
    def read(text: str) -> "Template":
        document = _document(text)
        if unknown := sorted(set(document) - _PARTS):
            raise Invalid(f"Invalid template property or properties {unknown}")
        if not document.get("Resources"):
            raise Invalid("At least one Resources member must be defined.")
        return Template(
            text,
            document.get("Parameters", {}),
            document.get("Mappings", {}),
            document.get("Conditions", {}),
            document.get("Rules", {}),
            {name: _declared(name, resource) for name, resource in document["Resources"].items()},
            document.get("Outputs", {}),
            document.get("Description"),
        )


NOTHING: Final = Template("", {}, {}, {}, {}, {}, {})


def _document(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else yaml.load(text, _Yaml)
    except (ValueError, yaml.YAMLError) as error:
        raise Invalid(f"Template format error: {error}") from error
    if not isinstance(document, dict):
        raise Invalid("Template format error: unsupported structure.")
    return document


class _Yaml(yaml.SafeLoader):
    """A YAML loader that knows the short forms of functions; dates stay text, as in JSON."""


def _short_form(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        return {name: value.split(".", 1) if suffix == "GetAtt" else value}
    if isinstance(node, yaml.SequenceNode):
        return {name: loader.construct_sequence(node, deep=True)}
    assert isinstance(node, yaml.MappingNode)  # YAML has three kinds of nodes
    return {name: loader.construct_mapping(node, deep=True)}


_Yaml.add_multi_constructor("!", _short_form)
_Yaml.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node))


def _declared(name: str, body: Mapping[str, Any]) -> Declared:
    if unknown := sorted(set(body) - _OF_A_RESOURCE):
        raise Invalid(f"Invalid template resource property '{unknown[0]}' of {name}")
    if "Type" not in body:
        raise Invalid(f"Every Resources object must contain a Type member: {name}")
    after = body.get("DependsOn", ())
    return Declared(
        name,
        body["Type"],
        body.get("Properties", {}),
        body.get("Condition"),
        (after,) if isinstance(after, str) else tuple(after),
        body.get("DeletionPolicy", "Delete"),
        body.get("UpdateReplacePolicy", "Delete"),
        {name: body[name] for name in ("CreationPolicy", "UpdatePolicy") if name in body},
    )


def names_in(value: Any) -> Iterator[str]:
    """The logical names of resources and parameters in an expression."""
    if isinstance(value, list):
        for member in value:
            yield from names_in(member)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name == "Ref":
                yield inner
            elif name == "Fn::GetAtt":
                yield (inner if isinstance(inner, list) else inner.split("."))[0]
            elif name == "Fn::Sub":
                text, *rest = inner if isinstance(inner, list) else [inner]
                own = rest[0] if rest else {}
                yield from (found.split(".")[0] for found in _IN_TEXT.findall(text) if found not in own)
                yield from names_in(list(own.values()))
            else:
                yield from names_in(inner)


def in_order(template: Template, present: Mapping[str, Declared]) -> list[Declared]:
    """The resources, each after those that it depends on; otherwise in the order of the template."""
    done: dict[str, Declared] = {}

    def visit(declared: Declared, path: tuple[str, ...]) -> None:
        if declared.logical in path:
            circle = " -> ".join([*path[path.index(declared.logical) :], declared.logical])
            raise Invalid(f"Circular dependency between resources: [{circle}]")
        if declared.logical in done:
            return
        for name in sorted({*declared.needs, *declared.after} & present.keys() - {declared.logical}):
            visit(present[name], (*path, declared.logical))
        done[declared.logical] = declared

    for declared in present.values():
        visit(declared, ())
    missing = {name for declared in present.values() for name in declared.after if name not in template.resources}
    if missing:
        raise Invalid(
            f"Template format error: Unresolved resource dependencies {sorted(missing)} in the Resources block"
        )
    return list(done.values())
