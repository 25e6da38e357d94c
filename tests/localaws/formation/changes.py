"""The content of a change set."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.localaws.formation.deploy import AFTER_APPLY, enabled_resources, outputs_before
from tests.localaws.formation.evaluate import Evaluation, StackContext
from tests.localaws.formation.faults import Invalid
from tests.localaws.formation.provider import PROVIDERS
from tests.localaws.formation.stack import Resource, Stack
from tests.localaws.formation.template import Declared, Template, in_order


def changes(
    stack: Stack, template: Template, parameter_values: Mapping[str, str], context: StackContext
) -> list[dict[str, Any]]:
    """The changes resource by resource, in the order of execution."""
    known = dict(stack.resources)
    context = replace(context, output=outputs_before(stack))
    work = Evaluation(template, parameter_values, context, known, unknown=lambda _: AFTER_APPLY)
    desired = enabled_resources(template, work)
    result = []
    for declared in in_order(template, desired):
        old = stack.resources.get(declared.logical)
        change = _added(declared) if old is None else _modified(declared, old, _known_properties(declared, work))
        if change is not None:
            result.append(change)
            if change.get("Replacement") == "True":
                known.pop(declared.logical)  # references to it get a new value
    result += [_removed(old) for name, old in stack.resources.items() if name not in desired]
    return [{"Type": "Resource", "ResourceChange": change} for change in result]


def _known_properties(declared: Declared, work: Evaluation) -> dict[str, Any]:
    """The properties; one that refers to a resource not yet created has the value that marks it as changed."""
    result = {}
    for name, value in declared.properties.items():
        try:
            result[name] = work(value)
        except Invalid:
            result[name] = AFTER_APPLY
    return {name: value for name, value in result.items() if value is not None}


def _added(declared: Declared) -> dict[str, Any]:
    return {
        "Action": "Add",
        "LogicalResourceId": declared.logical,
        "ResourceType": declared.type,
        "Scope": [],
        "Details": [],
    }


def _removed(old: Resource) -> dict[str, Any]:
    retained = old.declared.keep_on_delete == "Retain"
    return {
        "Action": "Remove",
        "LogicalResourceId": old.declared.logical,
        "PhysicalResourceId": old.physical,
        "ResourceType": old.declared.type,
        "PolicyAction": "Retain" if retained else "Delete",
        "Scope": [],
        "Details": [],
    }


def _modified(declared: Declared, old: Resource, desired: Mapping[str, Any]) -> dict[str, Any] | None:
    changed = sorted(name for name in {*old.properties, *desired} if old.properties.get(name) != desired.get(name))
    policies = old.declared.policies != declared.policies
    if not changed and not policies and old.declared.type == declared.type:
        return None
    provider = PROVIDERS.get(declared.type)
    fixed = provider.fixed if provider else frozenset()
    replaced = old.declared.type != declared.type or any(name in fixed for name in changed)
    return {
        "Action": "Modify",
        "LogicalResourceId": declared.logical,
        "PhysicalResourceId": old.physical,
        "ResourceType": declared.type,
        "Replacement": str(replaced),
        "Scope": ["Properties"] * bool(changed) + ["UpdatePolicy"] * policies,
        "Details": [_detail(name, fixed) for name in changed],
    }


def _detail(name: str, fixed: frozenset[str]) -> dict[str, Any]:
    recreation = "Always" if name in fixed else "Never"
    target = {"Attribute": "Properties", "Name": name, "RequiresRecreation": recreation}
    return {"Target": target, "Evaluation": "Static", "ChangeSource": "DirectModification"}
