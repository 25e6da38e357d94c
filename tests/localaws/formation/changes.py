"""What a change set says that it would do."""

from collections.abc import Mapping
from typing import Any, Final

from tests.localaws.formation.deploy import wanted_of
from tests.localaws.formation.evaluate import Evaluation, Surroundings
from tests.localaws.formation.faults import Invalid
from tests.localaws.formation.provider import PROVIDERS
from tests.localaws.formation.stack import Resource, Stack
from tests.localaws.formation.template import Declared, Template, in_order

_AFTER_APPLY: Final = "{{changeSet:KNOWN_AFTER_APPLY}}"


def changes(stack: Stack, template: Template, given: Mapping[str, str], around: Surroundings) -> list[dict[str, Any]]:
    """Resource by resource, in the order in which they would be carried out."""
    known = dict(stack.resources)
    work = Evaluation(template, given, around, known, unknown=lambda _: _AFTER_APPLY)
    wanted = wanted_of(template, work)
    found = []
    for one in in_order(template, wanted):
        old = stack.resources.get(one.logical)
        change = _added(one) if old is None else _modified(one, old, _as_far_as_known(one, work))
        if change is not None:
            found.append(change)
            if change.get("Replacement") == "True":
                known.pop(one.logical)  # whoever refers to it gets another one
    found += [_removed(old) for name, old in stack.resources.items() if name not in wanted]
    return [{"Type": "Resource", "ResourceChange": change} for change in found]


def _as_far_as_known(one: Declared, work: Evaluation) -> dict[str, Any]:
    """A value that cannot be worked out before something else is there has changed."""
    found = {}
    for name, value in one.properties.items():
        try:
            found[name] = work(value)
        except Invalid:
            found[name] = _AFTER_APPLY
    return {name: value for name, value in found.items() if value is not None}


def _added(one: Declared) -> dict[str, Any]:
    return {"Action": "Add", "LogicalResourceId": one.logical, "ResourceType": one.type, "Scope": [], "Details": []}


def _removed(old: Resource) -> dict[str, Any]:
    kept = old.declared.keep_on_delete == "Retain"
    return {
        "Action": "Remove",
        "LogicalResourceId": old.declared.logical,
        "PhysicalResourceId": old.physical,
        "ResourceType": old.declared.type,
        "PolicyAction": "Retain" if kept else "Delete",
        "Scope": [],
        "Details": [],
    }


def _modified(one: Declared, old: Resource, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    changed = sorted(name for name in {*old.properties, *wanted} if old.properties.get(name) != wanted.get(name))
    policies = old.declared.policies != one.policies
    if not changed and not policies and old.declared.type == one.type:
        return None
    provider = PROVIDERS.get(one.type)
    fixed = provider.fixed if provider else frozenset()
    replaced = old.declared.type != one.type or any(name in fixed for name in changed)
    return {
        "Action": "Modify",
        "LogicalResourceId": one.logical,
        "PhysicalResourceId": old.physical,
        "ResourceType": one.type,
        "Replacement": str(replaced),
        "Scope": ["Properties"] * bool(changed) + ["UpdatePolicy"] * policies,
        "Details": [_detail(name, fixed) for name in changed],
    }


def _detail(name: str, fixed: frozenset[str]) -> dict[str, Any]:
    recreation = "Always" if name in fixed else "Never"
    target = {"Attribute": "Properties", "Name": name, "RequiresRecreation": recreation}
    return {"Target": target, "Evaluation": "Static", "ChangeSource": "DirectModification"}
