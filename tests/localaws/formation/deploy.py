"""Deployment of a template: creates and updates in order of dependencies, and rolls back in reverse order on failure.

Each finished step is recorded with the step that undoes it. Obsolete resources are removed last, when nothing can fail
any more.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from tests.localaws.formation.evaluate import Evaluation, StackContext
from tests.localaws.formation.faults import Invalid, Refused
from tests.localaws.formation.provider import PhysicalResource, Properties, Site, provider_of
from tests.localaws.formation.stack import Output, Resource, Stack
from tests.localaws.formation.template import Declared, Template, in_order

_log = logging.getLogger(__name__)
_RETAINED = ("Retain", "Snapshot")


_Result = TypeVar("_Result")


class _Failed(Exception):
    """A resource has failed; the events have its name and the reason."""


@dataclass
class Deployment:
    stack: Stack
    context: StackContext
    imported: set[str] = field(default_factory=set)  # filled while values are evaluated
    users_of: Callable[[str], list[str]] = field(default=lambda _: [])  # the stacks that import an export
    _work: Evaluation | None = None
    _planned: Evaluation | None = None  # with the outputs of other stacks as of the last deployment

    def create(self, template: Template, parameter_values: Mapping[str, str]) -> None:
        self.stack.set_status("CREATE_IN_PROGRESS", "User Initiated")
        self._execute(template, parameter_values, "CREATE", "ROLLBACK")

    def update(self, template: Template, parameter_values: Mapping[str, str]) -> None:
        self.stack.set_status("UPDATE_IN_PROGRESS", "User Initiated")
        self._execute(template, parameter_values, "UPDATE", "UPDATE_ROLLBACK")

    def delete(self) -> None:
        """Delete all resources; if some cannot be removed, they stay and the status is DELETE_FAILED."""
        self.stack.set_status("DELETE_IN_PROGRESS", "User Initiated")
        failed = [resource for resource in reversed(_in_dependency_order(self.stack)) if not self._remove(resource)]
        if failed:
            names = ", ".join(resource.declared.logical for resource in failed)
            self.stack.set_status("DELETE_FAILED", f"The following resource(s) failed to delete: [{names}].")
            return
        self.stack.outputs, self.stack.imports = [], frozenset()
        self.stack.set_status("DELETE_COMPLETE")

    # Creating and updating

    def _execute(self, template: Template, parameter_values: Mapping[str, str], verb: str, back: str) -> None:
        undo: list[Callable[[], None]] = []
        obsolete: list[Resource] = []
        before = (self.stack.template, self.stack.parameter_values, self.stack.values)
        read = dict(self.stack.outputs_read)
        try:
            context = replace(self.context, output=outputs_before(self.stack))
            self._planned = Evaluation(template, parameter_values, context, self.stack.resources)
            work = self._work = Evaluation(template, parameter_values, self.context, self.stack.resources)
            desired = enabled_resources(template, work)
            for declaration in in_order(template, desired):
                self._apply(declaration, work, undo, obsolete)
            outputs = [
                _output(key, declaration, work)
                for key, declaration in template.outputs.items()
                if _holds(declaration, work)
            ]
            self._check_exports(outputs)
        except (_Failed, Invalid, Refused) as failure:
            self._undo(undo, str(failure), back)
            self.stack.template, self.stack.parameter_values, self.stack.values = before
            self.stack.outputs_read = read
            return
        self.stack.template, self.stack.parameter_values, self.stack.values = (
            template,
            dict(parameter_values),
            work.values,
        )
        self.stack.outputs, self.stack.imports = outputs, frozenset(self.imported)
        self._clean_up(desired, obsolete, verb)
        self.stack.set_status(f"{verb}_COMPLETE")

    def _apply(
        self, declared: Declared, work: Evaluation, undo: list[Callable[[], None]], obsolete: list[Resource]
    ) -> None:
        """Create, update or keep one resource."""
        old = self.stack.resources.get(declared.logical)
        if old is not None and self._is_stale_at_most(declared, old):
            self.stack.resources[declared.logical] = replace(old, declared=declared)
            return
        properties = self._try(
            declared, old, "CREATE" if old is None else "UPDATE", lambda: dict(work(declared.properties))
        )
        if old is not None and (old.properties, old.declared.type, old.declared.policies) == (
            properties,
            declared.type,
            declared.policies,
        ):
            self.stack.resources[declared.logical] = replace(old, declared=declared)
            return
        if old is None:
            existing = self._make(declared, properties)
            undo.append(lambda: self._undo_create(declared.logical, None))
        elif old.declared.type != declared.type or self._is_replaced(declared, old, properties):
            self.stack.record_event(declared, old.physical, "UPDATE_IN_PROGRESS", _NEW_PHYSICAL)
            existing = self._make(declared, properties)
            obsolete.append(old)
            undo.append(lambda: self._undo_create(declared.logical, old))
        else:
            self.stack.record_event(declared, old.physical, "UPDATE_IN_PROGRESS")
            existing = self._change(declared, old.existing, old.properties, properties)
            self.stack.record_event(declared, existing.id, "UPDATE_COMPLETE")
            undo.append(lambda: self._undo_update(declared, old, properties))
        status = "CREATE_COMPLETE" if old is None else "UPDATE_COMPLETE"
        self.stack.resources[declared.logical] = Resource(declared, properties, existing, status)

    def _is_stale_at_most(self, declared: Declared, old: Resource) -> bool:
        """True if only the outputs that Fn::GetStackOutput reads may differ: CloudFormation then leaves it alone."""
        if "Fn::GetStackOutput" not in str(declared.properties) or self._planned is None:
            return False
        planned = self._planned
        same = (old.declared.type, old.declared.policies) == (declared.type, declared.policies)
        return same and self._try(declared, old, "UPDATE", lambda: planned(declared.properties)) == old.properties

    def _is_replaced(self, declared: Declared, old: Resource, properties: Properties) -> bool:
        fixed = self._try(declared, old, "UPDATE", lambda: provider_of(declared.type, properties).fixed)
        return any(old.properties.get(name) != properties.get(name) for name in fixed)

    def _make(self, declared: Declared, properties: Properties) -> PhysicalResource:
        self.stack.record_event(declared, "", "CREATE_IN_PROGRESS")
        site = self._site(declared)
        try:
            existing = self._try(
                declared, None, "CREATE", lambda: provider_of(declared.type, properties).create(properties, site)
            )
        except _Failed:
            if site.begun:  # remove a partly created resource
                self._delete(Resource(declared, properties, site.begun[-1]))
            raise
        self.stack.record_event(declared, existing.id, "CREATE_COMPLETE")
        return existing

    def _change(
        self, declared: Declared, existing: PhysicalResource, before: Properties, desired: Properties
    ) -> PhysicalResource:
        old = Resource(declared, before, existing)
        return self._try(
            declared,
            old,
            "UPDATE",
            lambda: provider_of(declared.type, desired).update(existing, before, desired, self._site(declared)),
        )

    def _try(self, declared: Declared, old: Resource | None, verb: str, action: Callable[[], _Result]) -> _Result:
        """Run an action; record an error as the failure of the resource, with its reason."""
        try:
            return action()
        except (ClientError, BotoCoreError, Refused, Invalid) as error:
            reason = str(error)
        except Exception as error:  # an error in a provider fails the stack, not the request
            _log.exception("%s of %s", verb, declared.logical)
            reason = f"{type(error).__name__}: {error}"
        self.stack.record_event(declared, old.physical if old else "", f"{verb}_FAILED", reason)
        raise _Failed(f"The following resource(s) failed to {verb.lower()}: [{declared.logical}].")

    def _check_exports(self, outputs: list[Output]) -> None:
        old = {output.export: output.value for output in self.stack.outputs if output.export}
        new = {output.export: output.value for output in outputs if output.export}
        for name, value in old.items():
            if new.get(name) != value and (users := self.users_of(name)):
                raise Refused(f"Export {name} cannot be updated as it is in use by {', '.join(users)}")

    def _clean_up(self, desired: Mapping[str, Declared], obsolete: list[Resource], verb: str) -> None:
        removed = [
            resource
            for resource in reversed(_in_dependency_order(self.stack))
            if resource.declared.logical not in desired
        ]
        if verb == "UPDATE" and (removed or obsolete):
            self.stack.set_status("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
        for old in reversed(obsolete):
            if old.declared.keep_on_replace not in _RETAINED:
                self._delete(old)
        for resource in removed:
            self._remove(resource)
            self.stack.resources.pop(resource.declared.logical, None)

    # Undoing

    def _undo(self, undo: list[Callable[[], None]], reason: str, back: str) -> None:
        self.stack.set_status(f"{back}_IN_PROGRESS", reason)
        try:
            for step in reversed(undo):
                step()
        except _Failed as failure:
            self.stack.set_status(f"{back}_FAILED", str(failure))
            return
        self.stack.set_status(f"{back}_COMPLETE", reason)

    def _undo_create(self, logical: str, old: Resource | None) -> None:
        new = self.stack.resources[logical]
        if new.declared.keep_on_delete not in _RETAINED and not self._delete(new):
            raise _Failed(f"The following resource(s) failed to delete: [{logical}].")
        self.stack.resources.pop(logical)
        if old is not None:
            self.stack.resources[logical] = old

    def _undo_update(self, declared: Declared, old: Resource, properties: Properties) -> None:
        existing = self._change(declared, self.stack.resources[declared.logical].existing, properties, old.properties)
        self.stack.resources[declared.logical] = replace(old, existing=existing)

    # Removing

    def _remove(self, resource: Resource) -> bool:
        if resource.declared.keep_on_delete in _RETAINED:
            self.stack.record_event(resource.declared, resource.physical, "DELETE_SKIPPED")
        elif not self._delete(resource):
            return False
        self.stack.resources.pop(resource.declared.logical, None)
        return True

    def _delete(self, resource: Resource) -> bool:
        declared = resource.declared
        self.stack.record_event(declared, resource.physical, "DELETE_IN_PROGRESS")
        try:
            self._try(declared, resource, "DELETE", lambda: self._delete_by_provider(resource))
        except _Failed:
            return False
        self.stack.record_event(declared, resource.physical, "DELETE_COMPLETE")
        return True

    def _delete_by_provider(self, resource: Resource) -> None:
        provider_of(resource.declared.type, {}).delete(
            resource.existing, resource.properties, self._site(resource.declared)
        )

    def _site(self, declared: Declared) -> Site:
        context = self.context
        policies = self._work(declared.policies) if self._work else {}
        return Site(context.account, context.region, context.partition, self.stack.name, declared.logical, policies)


_NEW_PHYSICAL = "Requested update requires the creation of a new physical resource; hence creating one."


AFTER_APPLY: Final = "{{changeSet:KNOWN_AFTER_APPLY}}"


def outputs_before(stack: Stack) -> Callable[[str, str, str | None], str]:
    """Outputs of other stacks as a change set has them: those read before are not read again, others are unknown."""
    read = dict(stack.outputs_read)
    return lambda name, key, region: read.get((name, key, region), AFTER_APPLY)


def enabled_resources(template: Template, work: Evaluation) -> dict[str, Declared]:
    """The resources whose conditions hold."""
    return {
        name: declared
        for name, declared in template.resources.items()
        if declared.condition is None or work.holds(declared.condition)
    }


def _holds(output: Mapping[str, Any], work: Evaluation) -> bool:
    return "Condition" not in output or work.holds(output["Condition"])


def _output(key: str, declaration: Mapping[str, Any], work: Evaluation) -> Output:
    export = work(declaration["Export"]["Name"]) if "Export" in declaration else None
    return Output(key, str(work(declaration["Value"])), declaration.get("Description"), export)


def _in_dependency_order(stack: Stack) -> list[Resource]:
    """The existing resources, each after those that it depends on."""
    declared = {name: entry.declared for name, entry in stack.resources.items()}
    done: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        entry = declared[name]
        for needed in sorted({*entry.needs, *entry.after} & declared.keys() - {name}):
            visit(needed)
        done.append(name)

    for name in declared:
        visit(name)
    return [stack.resources[name] for name in done]
