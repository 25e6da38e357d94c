"""CloudFormation's calls, as the command line and the SDKs make them."""

import json
from collections.abc import Mapping
from typing import Any

from moto.cloudformation.utils import get_stack_from_s3_url
from moto.core.responses import ActionResult, BaseResponse, EmptyResult

from tests.localaws.formation.faults import Invalid, MissingCapability, NoSuchChangeSet
from tests.localaws.formation.models import Stacks, cloudformation_backends
from tests.localaws.formation.stack import ChangeSet, Output, Stack
from tests.localaws.formation.template import Template

_NAMED = ("AWS::IAM::Group", "AWS::IAM::InstanceProfile", "AWS::IAM::ManagedPolicy", "AWS::IAM::Role", "AWS::IAM::User")
_NAME_OF = {"AWS::IAM::Role": "RoleName", "AWS::IAM::ManagedPolicy": "ManagedPolicyName"}


class Service(BaseResponse):
    def __init__(self) -> None:
        super().__init__(service_name="cloudformation")
        self.automated_parameter_parsing = True

    @property
    def _stacks(self) -> Stacks:
        found: Stacks = cloudformation_backends[self.current_account][self.region]
        return found

    # Change sets

    def create_change_set(self) -> ActionResult:
        name, kind = self._get_param("StackName"), self._get_param("ChangeSetType", "UPDATE")
        old = self._stacks.find(name) if kind == "UPDATE" else None
        template = self._template(old)
        self._require_capabilities(template)
        made = self._stacks.propose(
            name,
            self._get_param("ChangeSetName"),
            kind,
            template,
            self._given(old),
            tags=self._tags() or {},
            description=self._get_param("Description"),
        )
        stack, _ = self._stacks.change_set(made.id, None)
        return ActionResult({"Id": made.id, "StackId": stack.id})

    def describe_change_set(self) -> ActionResult:
        return ActionResult(_change_set(*self._change_set()))

    def execute_change_set(self) -> ActionResult:
        self._stacks.execute(*self._change_set())
        return EmptyResult()

    def delete_change_set(self) -> ActionResult:
        try:
            stack, one = self._change_set()
        except NoSuchChangeSet:
            return EmptyResult()  # as on AWS: the command line removes what may not be there
        stack.change_sets.remove(one)
        return EmptyResult()

    def list_change_sets(self) -> ActionResult:
        stack = self._stack()
        return ActionResult({"Summaries": [_change_set(stack, one) for one in stack.change_sets]})

    # Stacks

    def create_stack(self) -> ActionResult:
        template = self._template(None)
        self._require_capabilities(template)
        stack = self._stacks.create(self._get_param("StackName"), template, self._given(None), self._tags() or {})
        stack.protected = self._get_bool_param("EnableTerminationProtection", False)
        return ActionResult({"StackId": stack.id})

    def update_stack(self) -> ActionResult:
        stack = self._stack()
        template = self._template(stack)
        self._require_capabilities(template)
        self._stacks.update(stack, template, self._given(stack), self._tags())
        return ActionResult({"StackId": stack.id})

    def delete_stack(self) -> ActionResult:
        name = self._get_param("StackName")
        if any(name in (stack.id, stack.name) for stack in self._stacks.all.values()):
            self._stacks.delete(self._stack())
        return EmptyResult()

    def describe_stacks(self) -> ActionResult:
        name = self._get_param("StackName")
        known = self._stacks.all.values()
        found = [self._stacks.find(name)] if name else [one for one in known if one.status != "DELETE_COMPLETE"]
        return ActionResult({"Stacks": [_stack(one) for one in found]})

    def list_stacks(self) -> ActionResult:
        wanted = self._get_param("StackStatusFilter", [])
        found = [one for one in self._stacks.all.values() if not wanted or one.status in wanted]
        return ActionResult({"StackSummaries": [_stack(one) for one in found]})

    def update_termination_protection(self) -> ActionResult:
        stack = self._stack()
        stack.protected = self._get_bool_param("EnableTerminationProtection", False)
        return ActionResult({"StackId": stack.id})

    def describe_stack_events(self) -> ActionResult:
        return ActionResult({"StackEvents": self._stack().events[::-1]})

    def describe_events(self) -> ActionResult:
        """The newer form of the events; the command line asks for it where something failed."""
        name = self._get_param("StackName")
        stack = self._stacks.find(name) if name else self._change_set()[0]
        return ActionResult({"OperationEvents": stack.events[::-1]})

    def describe_stack_resources(self) -> ActionResult:
        stack, only = self._stack(), self._get_param("LogicalResourceId")
        return ActionResult(
            {"StackResources": [one for one in _resources(stack) if not only or only == one["LogicalResourceId"]]}
        )

    def describe_stack_resource(self) -> ActionResult:
        stack, name = self._stack(), self._get_param("LogicalResourceId")
        for one in _resources(stack):
            if one["LogicalResourceId"] == name:
                return ActionResult({"StackResourceDetail": one | {"LastUpdatedTimestamp": one["Timestamp"]}})
        raise Invalid(f"Resource {name} does not exist for stack {stack.name}")

    def list_stack_resources(self) -> ActionResult:
        found = _resources(self._stack())
        return ActionResult(
            {"StackResourceSummaries": [one | {"LastUpdatedTimestamp": one["Timestamp"]} for one in found]}
        )

    def get_template(self) -> ActionResult:
        return ActionResult({"TemplateBody": self._stack().template.text, "StagesAvailable": ["Original", "Processed"]})

    def get_template_summary(self) -> ActionResult:
        stack = self._stack() if self._get_param("StackName") else None
        template = stack.template if stack else self._template(None)
        return ActionResult(
            {
                "Description": template.description,
                "Parameters": [
                    {"ParameterKey": name, **_declaration(one)} for name, one in template.parameters.items()
                ],
                "ResourceTypes": sorted({one.type for one in template.resources.values()}),
            }
        )

    def validate_template(self) -> ActionResult:
        template = self._template(None)
        parameters = [{"ParameterKey": name, **_declaration(one)} for name, one in template.parameters.items()]
        return ActionResult({"Parameters": parameters, "Description": template.description})

    def list_exports(self) -> ActionResult:
        found = self._stacks.exports()
        return ActionResult(
            {
                "Exports": [
                    {"ExportingStackId": stack.id, "Name": name, "Value": value}
                    for name, (stack, value) in sorted(found.items())
                ]
            }
        )

    def list_imports(self) -> ActionResult:
        return ActionResult({"Imports": self._stacks.users_of(self._get_param("ExportName"))})

    # What a call gives

    def _stack(self) -> Stack:
        return self._stacks.find(self._get_param("StackName"))

    def _change_set(self) -> tuple[Stack, ChangeSet]:
        return self._stacks.change_set(self._get_param("ChangeSetName"), self._get_param("StackName"))

    def _template(self, old: Stack | None) -> Template:
        if self._get_bool_param("UsePreviousTemplate", False):
            if old is None:
                raise Invalid("There is no previous template")
            return old.template
        text = self._get_param("TemplateBody")
        if not text:
            url = self._get_param("TemplateURL")
            if not url:
                raise Invalid("Either Template URL or Template Body must be specified.")
            text = get_stack_from_s3_url(url, account_id=self.current_account, partition=self.partition)
        return Template.read(text)

    def _given(self, old: Stack | None) -> dict[str, str]:
        found = {}
        for one in self._get_param("Parameters", []):
            name = one["ParameterKey"]
            if one.get("UsePreviousValue") in (True, "true"):
                if old is None or name not in old.given:
                    continue  # its default, then
                found[name] = old.given[name]
            else:
                found[name] = one.get("ParameterValue", "")
        return found

    def _tags(self) -> dict[str, str] | None:
        tags = self._get_param("Tags")
        return None if tags is None else {tag["Key"]: tag["Value"] for tag in tags}

    def _require_capabilities(self, template: Template) -> None:
        given = set(self._get_param("Capabilities", []))
        needed = [one for one in template.resources.values() if one.type in (*_NAMED, "AWS::IAM::Policy")]
        named = [one for one in needed if _NAME_OF.get(one.type) in one.properties]
        if (named and "CAPABILITY_NAMED_IAM" not in given) or (
            needed and not given & {"CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"}
        ):
            raise MissingCapability(f"Requires capabilities : [CAPABILITY_{'NAMED_' if named else ''}IAM]")


def _declaration(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "DefaultValue": one.get("Default"),
        "NoEcho": False,
        "ParameterType": one["Type"],
        "Description": one.get("Description"),
    }


def _parameters(stack: Stack, given: Mapping[str, str], template: Template) -> list[dict[str, str]]:
    found = []
    for name, one in template.parameters.items():
        value = given.get(name, one.get("Default", ""))
        resolved = stack.values.get(name) if one["Type"].startswith("AWS::SSM::") else None
        each = {"ParameterKey": name, "ParameterValue": str(value)}
        found.append(each | ({"ResolvedValue": str(resolved)} if resolved is not None else {}))
    return found


def _list_of_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _stack(stack: Stack) -> dict[str, Any]:
    return {
        "StackId": stack.id,
        "StackName": stack.name,
        "Description": stack.template.description,
        "Parameters": _parameters(stack, stack.given, stack.template),
        "CreationTime": stack.created,
        "LastUpdatedTime": stack.updated,
        "DeletionTime": stack.deleted,
        "StackStatus": stack.status,
        "StackStatusReason": stack.reason,
        "DisableRollback": False,
        "NotificationARNs": [],
        "Capabilities": ["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"],
        "Outputs": [_output(one) for one in stack.outputs],
        "Tags": _list_of_tags(stack.tags),
        "EnableTerminationProtection": stack.protected,
        "TemplateDescription": stack.template.description,
    }


def _output(one: Output) -> dict[str, Any]:
    return {
        "OutputKey": one.key,
        "OutputValue": one.value,
        "Description": one.description,
        "ExportName": one.export,
    }


def _change_set(stack: Stack, one: ChangeSet) -> dict[str, Any]:
    return {
        "ChangeSetId": one.id,
        "ChangeSetName": one.name,
        "ChangeSetType": one.kind,
        "StackId": stack.id,
        "StackName": stack.name,
        "Description": one.description,
        "Parameters": _parameters(stack, one.given, one.template),
        "CreationTime": one.created,
        "ExecutionStatus": one.execution,
        "Status": one.status,
        "StatusReason": one.reason,
        "Tags": _list_of_tags(one.tags),
        "Changes": one.changes,
        "IncludeNestedStacks": False,
    }


def _resources(stack: Stack) -> list[dict[str, Any]]:
    return [
        {
            "StackName": stack.name,
            "StackId": stack.id,
            "LogicalResourceId": name,
            "PhysicalResourceId": one.physical,
            "ResourceType": one.declared.type,
            "Timestamp": one.since,
            "ResourceStatus": one.status,
            "Metadata": json.dumps({}),
        }
        for name, one in stack.resources.items()
    ]
