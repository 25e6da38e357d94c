"""A template as it was sent: what it holds, before anything in it is worked out."""

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
        """The names that it refers to: alarms of an update policy, too, are there before it is."""
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
            {name: _declared(name, one) for name, one in document["Resources"].items()},
            document.get("Outputs", {}),
            document.get("Description"),
        )


NOTHING: Final = Template("", {}, {}, {}, {}, {}, {})


def _document(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text.lstrip().startswith("{") else yaml.load(text, _Yaml)
    except (ValueError, yaml.YAMLError) as error:
        raise Invalid(f"Template format error: {error}") from error
    if not isinstance(found, dict):
        raise Invalid("Template format error: unsupported structure.")
    return found


class _Yaml(yaml.SafeLoader):
    """Knows the short forms of functions; dates stay text, as in JSON."""


def _short_form(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    name = suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}"
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
        return {name: value.split(".", 1) if suffix == "GetAtt" else value}
    if isinstance(node, yaml.SequenceNode):
        return {name: loader.construct_sequence(node, deep=True)}
    assert isinstance(node, yaml.MappingNode)  # there is no fourth kind of node
    return {name: loader.construct_mapping(node, deep=True)}


_Yaml.add_multi_constructor("!", _short_form)
_Yaml.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: loader.construct_scalar(node))


def _declared(name: str, one: Mapping[str, Any]) -> Declared:
    if unknown := sorted(set(one) - _OF_A_RESOURCE):
        raise Invalid(f"Invalid template resource property '{unknown[0]}' of {name}")
    if "Type" not in one:
        raise Invalid(f"Every Resources object must contain a Type member: {name}")
    after = one.get("DependsOn", ())
    return Declared(
        name,
        one["Type"],
        one.get("Properties", {}),
        one.get("Condition"),
        (after,) if isinstance(after, str) else tuple(after),
        one.get("DeletionPolicy", "Delete"),
        one.get("UpdateReplacePolicy", "Delete"),
        {name: one[name] for name in ("CreationPolicy", "UpdatePolicy") if name in one},
    )


def names_in(value: Any) -> Iterator[str]:
    """The logical names that an expression refers to, of resources and of parameters."""
    if isinstance(value, list):
        for each in value:
            yield from names_in(each)
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
    """Each resource behind those that it needs; else as the template has them."""
    done: dict[str, Declared] = {}

    def visit(one: Declared, path: tuple[str, ...]) -> None:
        if one.logical in path:
            circle = " -> ".join([*path[path.index(one.logical) :], one.logical])
            raise Invalid(f"Circular dependency between resources: [{circle}]")
        if one.logical in done:
            return
        for name in sorted({*one.needs, *one.after} & present.keys() - {one.logical}):
            visit(present[name], (*path, one.logical))
        done[one.logical] = one

    for one in present.values():
        visit(one, ())
    missing = {name for one in present.values() for name in one.after if name not in template.resources}
    if missing:
        raise Invalid(
            f"Template format error: Unresolved resource dependencies {sorted(missing)} in the Resources block"
        )
    return list(done.values())
