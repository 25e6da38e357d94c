"""Deployment plan: which resources a deployment creates, updates, replaces or deletes, and which instances restart.

The plan follows from the templates alone. AWS's resource schemas define which properties can be updated in place; this
module adds which changes restart instances.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, TypeAlias

from nxpipe.stacks.lint.launches import GROUP, NODES, TEMPLATE, launches, size_of
from nxpipe.stacks.lint.template import Resource, Template, Templates

Kind: TypeAlias = Literal["added", "removed", "left", "changed", "replaced", "unclear"]

# In order of display.
KINDS: Final[tuple[Kind, ...]] = ("replaced", "removed", "unclear", "left", "changed", "added")

# Properties of a node group whose update replaces its nodes one by one.
_ROLLING: Final = frozenset({"ReleaseVersion", "Version"})


@dataclass(frozen=True)
class Change:
    resource: Resource
    kind: Kind
    properties: tuple[str, ...] = ()  # those that differ; for a replacement, those that force it


@dataclass(frozen=True)
class Restart:
    """Instances of a group that are replaced, and the changed resource that causes it."""

    group: Resource
    by: Resource
    instances: int | None


@dataclass(frozen=True)
class Refused:
    """A resource that CloudFormation neither replaces nor deletes while stacks import it."""

    resource: Resource
    importers: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    changes: tuple[Change, ...]
    restarts: tuple[Restart, ...]
    forgotten: tuple[str, ...]  # deployed stacks that are no longer in the app; CDK leaves them unchanged
    refused: tuple[Refused, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.changes and not self.forgotten


def plan(before: Templates, after: Templates) -> Plan:
    own = [change for template in after.all for change in _of_stack(template, before, after)]
    changes = tuple(
        sorted(
            [*own, *_of_readers(own, after)],
            key=lambda change: (change.resource.stack, KINDS.index(change.kind), change.resource.path),
        )
    )
    forgotten = tuple(sorted({old.stack for old in before.all} - {new.stack for new in after.all}))
    return Plan(changes, tuple(_restarts(changes, after)), forgotten, tuple(_refused(changes, before)))


def _of_readers(changes: Sequence[Change], after: Templates) -> Iterator[Change]:
    """Changes of unchanged resources that read a replaced one in another stack: they get its new identifiers."""
    handled = {change.resource.key for change in changes}
    readers: dict[tuple[str, str], tuple[Resource, set[str]]] = {}
    for change in changes:
        for user, key, _ in after.uses_elsewhere(change.resource) if change.kind == "replaced" else ():
            if user.key not in handled:
                readers.setdefault(user.key, (user, set()))[1].add(key)
    for user, keys in readers.values():
        yield _changed(user, tuple(sorted(keys)))


def _refused(changes: Sequence[Change], before: Templates) -> Iterator[Refused]:
    for change in changes:
        if change.kind in ("left", "removed", "replaced"):
            importers = {user.stack for user, _, imports in before.uses_elsewhere(change.resource) if imports}
            if importers:
                yield Refused(change.resource, tuple(sorted(importers)))


def _of_stack(template: Template, before: Templates, after: Templates) -> Iterator[Change]:
    old = next((known.resources for known in before.all if known.stack == template.stack), {})
    for id_, resource in template.resources.items():
        previous = old.get(id_)
        if previous is None:
            yield Change(resource, "added")
        elif previous.type != resource.type:
            yield Change(resource, "replaced", ("Type",))
        elif differing := _differences(before.with_origins(previous), after.with_origins(resource)):
            yield _changed(resource, differing)
    for id_, previous in old.items():
        if id_ not in template.resources:
            yield Change(previous, "left" if previous.kept else "removed")


def _differences(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    return tuple(sorted(key for key in {*before, *after} if before.get(key) != after.get(key)))


def _changed(resource: Resource, differing: tuple[str, ...]) -> Change:
    fixed = fixed_properties().get(resource.type)
    if fixed is None:
        return Change(resource, "unclear", differing)
    forcing = tuple(key for key in differing if key in fixed)
    return Change(resource, "replaced", forcing) if forcing else Change(resource, "changed", differing)


def _restarts(changes: tuple[Change, ...], after: Templates) -> Iterator[Restart]:
    """Restarts of groups: one per group, however many changes affect its instances."""
    changed = {change.resource.key for change in changes if change.kind in ("changed", "replaced")}
    handled = {change.resource.key for change in changes if change.kind == "added"}
    for launch in launches(after):
        renewed = launch.resource.type == TEMPLATE and launch.resource.key in changed
        for user in launch.users if renewed else ():
            if user.type in (GROUP, NODES) and user.key not in handled:
                handled.add(user.key)
                yield Restart(user, launch.resource, _desired(user))
    for change in changes:
        if _replaces_instances(change) and change.resource.key not in handled:
            yield Restart(change.resource, change.resource, _desired(change.resource))


def _replaces_instances(change: Change) -> bool:
    if change.resource.type == NODES and not _ROLLING.isdisjoint(change.properties):
        return True
    return change.resource.type in (GROUP, NODES) and change.kind == "replaced"


def _desired(group: Resource) -> int | None:
    count = size_of(group)
    return int(str(count)) if str(count).isdigit() else None


@cache
def fixed_properties() -> Mapping[str, frozenset[str]]:
    """Properties that cannot be updated in place, by resource type: a new value replaces the resource."""
    known = json.loads(Path(__file__).with_name("fixed.json").read_text())
    return {type_: frozenset(properties) for type_, properties in known.items()}
