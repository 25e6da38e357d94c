"""Carrying a template out: made and changed in the order of need, undone in the other when something fails.

A step that has been done is remembered with what undoes it. Resources that are no longer wanted are removed last, when
nothing can fail any more.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from tests.localaws.formation.evaluate import Evaluation, Surroundings
from tests.localaws.formation.faults import Invalid, Refused
from tests.localaws.formation.provider import Made, Properties, Site, provider_of
from tests.localaws.formation.stack import Output, Resource, Stack
from tests.localaws.formation.template import Declared, Template, in_order

_log = logging.getLogger(__name__)
_RETAINED = ("Retain", "Snapshot")


_Result = TypeVar("_Result")


class _Failed(Exception):
    """A resource has failed; the events say which and why."""


@dataclass
class Deployment:
    stack: Stack
    around: Surroundings
    imported: set[str] = field(default_factory=set)  # filled while values are worked out
    users_of: Callable[[str], list[str]] = field(default=lambda _: [])  # of an export: the stacks that import it
    _work: Evaluation | None = None

    def create(self, template: Template, given: Mapping[str, str]) -> None:
        self.stack.tell("CREATE_IN_PROGRESS", "User Initiated")
        self._carry_out(template, given, "CREATE", "ROLLBACK")

    def update(self, template: Template, given: Mapping[str, str]) -> None:
        self.stack.tell("UPDATE_IN_PROGRESS", "User Initiated")
        self._carry_out(template, given, "UPDATE", "UPDATE_ROLLBACK")

    def delete(self) -> None:
        """What cannot be removed stays, and the stack says so."""
        self.stack.tell("DELETE_IN_PROGRESS", "User Initiated")
        failed = [one for one in reversed(_needed_first(self.stack)) if not self._remove(one)]
        if failed:
            names = ", ".join(one.declared.logical for one in failed)
            self.stack.tell("DELETE_FAILED", f"The following resource(s) failed to delete: [{names}].")
            return
        self.stack.outputs, self.stack.imports = [], frozenset()
        self.stack.tell("DELETE_COMPLETE")

    # Creating and updating

    def _carry_out(self, template: Template, given: Mapping[str, str], verb: str, back: str) -> None:
        undo: list[Callable[[], None]] = []
        obsolete: list[Resource] = []
        before = (self.stack.template, self.stack.given, self.stack.values)
        try:
            work = self._work = Evaluation(template, given, self.around, self.stack.resources)
            wanted = wanted_of(template, work)
            for one in in_order(template, wanted):
                self._settle(one, work, undo, obsolete)
            outputs = [_output(key, one, work) for key, one in template.outputs.items() if _holds(one, work)]
            self._check_exports(outputs)
        except (_Failed, Invalid, Refused) as failure:
            self._undo(undo, str(failure), back)
            self.stack.template, self.stack.given, self.stack.values = before
            return
        self.stack.template, self.stack.given, self.stack.values = template, dict(given), work.values
        self.stack.outputs, self.stack.imports = outputs, frozenset(self.imported)
        self._clean_up(wanted, obsolete, verb)
        self.stack.tell(f"{verb}_COMPLETE")

    def _settle(
        self, one: Declared, work: Evaluation, undo: list[Callable[[], None]], obsolete: list[Resource]
    ) -> None:
        """Make, change or leave one resource."""
        old = self.stack.resources.get(one.logical)
        properties = self._try(one, old, "CREATE" if old is None else "UPDATE", lambda: dict(work(one.properties)))
        if old is not None and (old.properties, old.declared.type, old.declared.policies) == (
            properties,
            one.type,
            one.policies,
        ):
            self.stack.resources[one.logical] = replace(old, declared=one)
            return
        if old is None:
            made = self._make(one, properties)
            undo.append(lambda: self._take_back(one.logical, None))
        elif old.declared.type != one.type or self._is_replaced(one, old, properties):
            self.stack.tell_of(one, old.physical, "UPDATE_IN_PROGRESS", _NEW_PHYSICAL)
            made = self._make(one, properties)
            obsolete.append(old)
            undo.append(lambda: self._take_back(one.logical, old))
        else:
            self.stack.tell_of(one, old.physical, "UPDATE_IN_PROGRESS")
            made = self._change(one, old.made, old.properties, properties)
            self.stack.tell_of(one, made.id, "UPDATE_COMPLETE")
            undo.append(lambda: self._change_back(one, old, properties))
        status = "CREATE_COMPLETE" if old is None else "UPDATE_COMPLETE"
        self.stack.resources[one.logical] = Resource(one, properties, made, status)

    def _is_replaced(self, one: Declared, old: Resource, properties: Properties) -> bool:
        fixed = self._try(one, old, "UPDATE", lambda: provider_of(one.type, properties).fixed)
        return any(old.properties.get(name) != properties.get(name) for name in fixed)

    def _make(self, one: Declared, properties: Properties) -> Made:
        self.stack.tell_of(one, "", "CREATE_IN_PROGRESS")
        site = self._site(one)
        try:
            made = self._try(one, None, "CREATE", lambda: provider_of(one.type, properties).create(properties, site))
        except _Failed:
            if site.begun:  # what is there in part must not stay behind
                self._delete(Resource(one, properties, site.begun[-1]))
            raise
        self.stack.tell_of(one, made.id, "CREATE_COMPLETE")
        return made

    def _change(self, one: Declared, made: Made, before: Properties, wanted: Properties) -> Made:
        old = Resource(one, before, made)
        return self._try(
            one, old, "UPDATE", lambda: provider_of(one.type, wanted).update(made, before, wanted, self._site(one))
        )

    def _try(self, one: Declared, old: Resource | None, verb: str, action: Callable[[], _Result]) -> _Result:
        """What fails is told as the resource's own failure, with the reason of whoever refused."""
        try:
            return action()
        except (ClientError, BotoCoreError, Refused, Invalid) as error:
            reason = str(error)
        except Exception as error:  # a provider's own fault must fail the stack, too, and not the request
            _log.exception("%s of %s", verb, one.logical)
            reason = f"{type(error).__name__}: {error}"
        self.stack.tell_of(one, old.physical if old else "", f"{verb}_FAILED", reason)
        raise _Failed(f"The following resource(s) failed to {verb.lower()}: [{one.logical}].")

    def _check_exports(self, outputs: list[Output]) -> None:
        gone = {one.export: one.value for one in self.stack.outputs if one.export}
        kept = {one.export: one.value for one in outputs if one.export}
        for name, value in gone.items():
            if kept.get(name) != value and (users := self.users_of(name)):
                raise Refused(f"Export {name} cannot be updated as it is in use by {', '.join(users)}")

    def _clean_up(self, wanted: Mapping[str, Declared], obsolete: list[Resource], verb: str) -> None:
        gone = [one for one in reversed(_needed_first(self.stack)) if one.declared.logical not in wanted]
        if verb == "UPDATE" and (gone or obsolete):
            self.stack.tell("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS")
        for old in reversed(obsolete):
            if old.declared.keep_on_replace not in _RETAINED:
                self._delete(old)
        for one in gone:
            self._remove(one)
            self.stack.resources.pop(one.declared.logical, None)

    # Undoing

    def _undo(self, undo: list[Callable[[], None]], reason: str, back: str) -> None:
        self.stack.tell(f"{back}_IN_PROGRESS", reason)
        try:
            for step in reversed(undo):
                step()
        except _Failed as failure:
            self.stack.tell(f"{back}_FAILED", str(failure))
            return
        self.stack.tell(f"{back}_COMPLETE", reason)

    def _take_back(self, logical: str, old: Resource | None) -> None:
        new = self.stack.resources[logical]
        if new.declared.keep_on_delete not in _RETAINED and not self._delete(new):
            raise _Failed(f"The following resource(s) failed to delete: [{logical}].")
        self.stack.resources.pop(logical)
        if old is not None:
            self.stack.resources[logical] = old

    def _change_back(self, one: Declared, old: Resource, properties: Properties) -> None:
        made = self._change(one, self.stack.resources[one.logical].made, properties, old.properties)
        self.stack.resources[one.logical] = replace(old, made=made)

    # Removing

    def _remove(self, one: Resource) -> bool:
        if one.declared.keep_on_delete in _RETAINED:
            self.stack.tell_of(one.declared, one.physical, "DELETE_SKIPPED")
        elif not self._delete(one):
            return False
        self.stack.resources.pop(one.declared.logical, None)
        return True

    def _delete(self, one: Resource) -> bool:
        declared = one.declared
        self.stack.tell_of(declared, one.physical, "DELETE_IN_PROGRESS")
        try:
            self._try(declared, one, "DELETE", lambda: self._delete_by_provider(one))
        except _Failed:
            return False
        self.stack.tell_of(declared, one.physical, "DELETE_COMPLETE")
        return True

    def _delete_by_provider(self, one: Resource) -> None:
        provider_of(one.declared.type, {}).delete(one.made, one.properties, self._site(one.declared))

    def _site(self, one: Declared) -> Site:
        around = self.around
        policies = self._work(one.policies) if self._work else {}
        return Site(around.account, around.region, around.partition, self.stack.name, one.logical, policies)


_NEW_PHYSICAL = "Requested update requires the creation of a new physical resource; hence creating one."


def wanted_of(template: Template, work: Evaluation) -> dict[str, Declared]:
    """The resources whose conditions hold."""
    return {name: one for name, one in template.resources.items() if one.condition is None or work.holds(one.condition)}


def _holds(output: Mapping[str, Any], work: Evaluation) -> bool:
    return "Condition" not in output or work.holds(output["Condition"])


def _output(key: str, one: Mapping[str, Any], work: Evaluation) -> Output:
    export = work(one["Export"]["Name"]) if "Export" in one else None
    return Output(key, str(work(one["Value"])), one.get("Description"), export)


def _needed_first(stack: Stack) -> list[Resource]:
    """What exists, each behind what it needs."""
    declared = {name: one.declared for name, one in stack.resources.items()}
    done: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        one = declared[name]
        for needed in sorted({*one.needs, *one.after} & declared.keys() - {name}):
            visit(needed)
        done.append(name)

    for name in declared:
        visit(name)
    return [stack.resources[name] for name in done]
