"""All stacks of an account in a region, and their exports."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import boto3
from botocore.exceptions import ClientError
from moto.core.base_backend import BackendDict, BaseBackend

from tests.localaws.formation.changes import changes
from tests.localaws.formation.deploy import Deployment
from tests.localaws.formation.evaluate import StackContext, check
from tests.localaws.formation.faults import AlreadyThere, Invalid, NoSuchChangeSet, NotThere, Refused, WrongState
from tests.localaws.formation.stack import ChangeSet, Stack
from tests.localaws.formation.template import Template

_SETTLED = ("_COMPLETE", "_FAILED", "REVIEW_IN_PROGRESS")


class Stacks(BaseBackend):
    """The stacks of a region. `run` executes an operation: synchronously in a test's process; in a thread in a server,
    where a request does not wait for a long operation."""

    run: Callable[[Callable[[], None]], None] = staticmethod(lambda job: job())

    def __init__(self, region_name: str, account_id: str) -> None:
        super().__init__(region_name, account_id)
        self.all: dict[str, Stack] = {}

    # Finding

    def find(self, name: str) -> Stack:
        """A stack by its name while it exists, or by its id at any time."""
        if name in self.all:
            return self.all[name]
        for stack in self.all.values():
            if stack.name == name and stack.status != "DELETE_COMPLETE":
                return stack
        raise NotThere(name)

    def change_set(self, name: str, stack_name: str | None) -> tuple[Stack, ChangeSet]:
        candidates = [self.find(stack_name)] if stack_name else self.all.values()
        for stack in candidates:
            for change_set in stack.change_sets:
                if name in (change_set.id, change_set.name):
                    return stack, change_set
        raise NoSuchChangeSet(f"ChangeSet [{name}] does not exist")

    def exports(self) -> dict[str, tuple[Stack, str]]:
        return {
            output.export: (stack, output.value)
            for stack in self.all.values()
            if stack.exists
            for output in stack.outputs
            if output.export
        }

    def users_of(self, export: str) -> list[str]:
        return [stack.name for stack in self.all.values() if stack.exists and export in stack.imports]

    # Doing

    def propose(
        self, name: str, set_name: str, kind: str, template: Template, parameter_values: Mapping[str, str], **rest: Any
    ) -> ChangeSet:
        """Create a change set. A change set without changes is created, too, with status FAILED."""
        check(template)
        stack = self._stack_for(name, kind)
        if any(change_set.name == set_name for change_set in stack.change_sets):
            raise AlreadyThere(f"ChangeSet {set_name} already exists")
        result = changes(stack, template, parameter_values, self._context(stack, set()))
        same = not result and _effective_content(stack.template) == _effective_content(template)
        existing = ChangeSet(
            self._arn(f"changeSet/{set_name}/{uuid.uuid4()}"),
            set_name,
            kind,
            template,
            parameter_values,
            changes=result,
            **rest,
        )
        if same:
            existing.status, existing.execution = "FAILED", "UNAVAILABLE"
            existing.reason = (
                "The submitted information didn't contain changes. Submit different information to create a change set."
            )
        stack.change_sets.append(existing)
        return existing

    def execute(self, stack: Stack, proposed: ChangeSet) -> None:
        if proposed.execution != "AVAILABLE":
            raise WrongState(
                f"ChangeSet [{proposed.id}] cannot be executed in its current status of [{proposed.status}]"
            )
        proposed.execution = "EXECUTE_IN_PROGRESS"

        def work(deployment: Deployment) -> None:
            stack.tags = dict(proposed.tags)
            (deployment.create if proposed.kind == "CREATE" else deployment.update)(
                proposed.template, proposed.parameter_values
            )
            proposed.execution = "EXECUTE_FAILED" if "ROLLBACK" in stack.status else "EXECUTE_COMPLETE"
            stack.change_sets = [change_set for change_set in stack.change_sets if change_set is proposed]

        self._work(stack, work)

    def create(
        self, name: str, template: Template, parameter_values: Mapping[str, str], tags: Mapping[str, str]
    ) -> Stack:
        check(template)
        stack = self._stack_for(name, "CREATE")
        stack.tags = dict(tags)
        self._work(stack, lambda deployment: deployment.create(template, parameter_values))
        return stack

    def update(
        self, stack: Stack, template: Template, parameter_values: Mapping[str, str], tags: Mapping[str, str] | None
    ) -> None:
        check(template)
        if _effective_content(stack.template) == _effective_content(template) and not changes(
            stack, template, parameter_values, self._context(stack, set())
        ):
            raise Invalid("No updates are to be performed.")
        stack.tags = stack.tags if tags is None else dict(tags)
        self._work(stack, lambda deployment: deployment.update(template, parameter_values))

    def delete(self, stack: Stack) -> None:
        if stack.status == "DELETE_COMPLETE":
            return
        if stack.protected:
            raise Invalid(f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled")
        for output in stack.outputs:
            if output.export and (users := self.users_of(output.export)):
                raise Invalid(f"Export {output.export} cannot be deleted as it is in use by {', '.join(users)}")
        self._work(stack, lambda deployment: deployment.delete())

    # Inside

    def _stack_for(self, name: str, kind: str) -> Stack:
        try:
            stack = self.find(name)
        except NotThere:
            if kind != "CREATE":
                raise
            stack = Stack(self._arn(f"stack/{name}/{uuid.uuid4()}"), name)
            self.all[stack.id] = stack
            stack.set_status("REVIEW_IN_PROGRESS", "User Initiated")
            return stack
        if kind == "CREATE" and stack.status != "REVIEW_IN_PROGRESS":
            raise AlreadyThere(f"Stack [{name}] already exists")
        if kind == "UPDATE" and stack.status in ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "REVIEW_IN_PROGRESS"):
            raise Invalid(f"Stack:{stack.id} is in {stack.status} state and can not be updated.")
        if not stack.status.endswith(_SETTLED):
            raise Invalid(f"Stack:{stack.id} is in {stack.status} state and can not be updated.")
        return stack

    def _work(self, stack: Stack, job: Callable[[Deployment], None]) -> None:
        if not stack.lock.acquire(blocking=False):
            raise Invalid(f"Stack:{stack.id} is in {stack.status} state and can not be updated.")
        imported: set[str] = set()
        deployment = Deployment(stack, self._context(stack, imported), imported, self.users_of)

        def whole() -> None:
            try:
                job(deployment)
            finally:
                stack.lock.release()

        Stacks.run(whole)

    def _context(self, stack: Stack, imported: set[str]) -> StackContext:
        def value_of(export: str) -> str:
            exported = self.exports().get(export)
            if exported is None:
                raise Refused(f"No export named {export} found. Rollback requested by user.")
            imported.add(export)
            return exported[1]

        def output_of(name: str, key: str, region: str | None) -> str:
            elsewhere: Stacks = cloudformation_backends[self.account_id][region or self.region_name]
            for output in elsewhere.find(name).outputs:
                if output.key == key:
                    stack.outputs_read[name, key, region] = output.value
                    return output.value
            raise Refused(f"stack {name} has no output {key}")

        return StackContext(
            self.account_id,
            self.region_name,
            self.partition,
            stack.name,
            stack.id,
            self._zones,
            value_of,
            output_of,
            self._parameter,
        )

    def _zones(self, region: str) -> list[str]:
        availability_zones = boto3.client("ec2", region_name=region).describe_availability_zones()["AvailabilityZones"]
        return sorted(zone["ZoneName"] for zone in availability_zones)

    def _parameter(self, name: str) -> str:
        try:
            value: str = boto3.client("ssm", region_name=self.region_name).get_parameter(Name=name)["Parameter"][
                "Value"
            ]
        except ClientError as error:
            raise Invalid(f"Unable to fetch parameters [{name}] from parameter store for this account.") from error
        return value

    def _arn(self, resource: str) -> str:
        return f"arn:{self.partition}:cloudformation:{self.region_name}:{self.account_id}:{resource}"


def _effective_content(template: Template) -> tuple[object, ...]:
    """The part of a template that counts for changes: outputs as well, which no resource shows."""
    return (template.resources, template.outputs, template.parameters, template.conditions, template.mappings)


cloudformation_backends = BackendDict(Stacks, "cloudformation")
