"""The API of CloudFormation, for the CDK and the SDKs."""

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
        result: Stacks = cloudformation_backends[self.current_account][self.region]
        return result

    # Change sets

    def create_change_set(self) -> ActionResult:
        name, kind = self._get_param("StackName"), self._get_param("ChangeSetType", "UPDATE")
        old = self._stacks.find(name) if kind == "UPDATE" else None
        template = self._template(old)
        self._require_capabilities(template)
        created = self._stacks.propose(
            name,
            self._get_param("ChangeSetName"),
            kind,
            template,
            self._parameter_values(old),
            tags=self._tags() or {},
            description=self._get_param("Description"),
        )
        stack, _ = self._stacks.change_set(created.id, None)
        return ActionResult({"Id": created.id, "StackId": stack.id})

    def describe_change_set(self) -> ActionResult:
        return ActionResult(_change_set(*self._change_set()))

    def execute_change_set(self) -> ActionResult:
        self._stacks.execute(*self._change_set())
        return EmptyResult()

    def delete_change_set(self) -> ActionResult:
        try:
            stack, change_set = self._change_set()
        except NoSuchChangeSet:
            return EmptyResult()  # as on AWS: the CDK deletes a change set that may not exist
        stack.change_sets.remove(change_set)
        return EmptyResult()

    def list_change_sets(self) -> ActionResult:
        stack = self._stack()
        return ActionResult({"Summaries": [_change_set(stack, change_set) for change_set in stack.change_sets]})

    # Stacks

    def create_stack(self) -> ActionResult:
        template = self._template(None)
        self._require_capabilities(template)
        stack = self._stacks.create(
            self._get_param("StackName"), template, self._parameter_values(None), self._tags() or {}
        )
        stack.protected = self._get_bool_param("EnableTerminationProtection", False)
        return ActionResult({"StackId": stack.id})

    def update_stack(self) -> ActionResult:
        stack = self._stack()
        template = self._template(stack)
        self._require_capabilities(template)
        self._stacks.update(stack, template, self._parameter_values(stack), self._tags())
        return ActionResult({"StackId": stack.id})

    def delete_stack(self) -> ActionResult:
        name = self._get_param("StackName")
        if any(name in (stack.id, stack.name) for stack in self._stacks.all.values()):
            self._stacks.delete(self._stack())
        return EmptyResult()

    def describe_stacks(self) -> ActionResult:
        name = self._get_param("StackName")
        known = self._stacks.all.values()
        result = [self._stacks.find(name)] if name else [entry for entry in known if entry.status != "DELETE_COMPLETE"]
        return ActionResult({"Stacks": [_stack(entry) for entry in result]})

    def list_stacks(self) -> ActionResult:
        desired = self._get_param("StackStatusFilter", [])
        result = [entry for entry in self._stacks.all.values() if not desired or entry.status in desired]
        return ActionResult({"StackSummaries": [_stack(entry) for entry in result]})

    def update_termination_protection(self) -> ActionResult:
        stack = self._stack()
        stack.protected = self._get_bool_param("EnableTerminationProtection", False)
        return ActionResult({"StackId": stack.id})

    def describe_stack_events(self) -> ActionResult:
        return ActionResult({"StackEvents": self._stack().events[::-1]})

    def describe_events(self) -> ActionResult:
        """The newer form of the events, which the CDK reads after a failure."""
        name = self._get_param("StackName")
        stack = self._stacks.find(name) if name else self._change_set()[0]
        return ActionResult({"OperationEvents": stack.events[::-1]})

    def describe_stack_resources(self) -> ActionResult:
        stack, only = self._stack(), self._get_param("LogicalResourceId")
        return ActionResult(
            {
                "StackResources": [
                    resource for resource in _resources(stack) if not only or only == resource["LogicalResourceId"]
                ]
            }
        )

    def describe_stack_resource(self) -> ActionResult:
        stack, name = self._stack(), self._get_param("LogicalResourceId")
        for resource in _resources(stack):
            if resource["LogicalResourceId"] == name:
                return ActionResult({"StackResourceDetail": resource | {"LastUpdatedTimestamp": resource["Timestamp"]}})
        raise Invalid(f"Resource {name} does not exist for stack {stack.name}")

    def list_stack_resources(self) -> ActionResult:
        resources = _resources(self._stack())
        return ActionResult(
            {"StackResourceSummaries": [entry | {"LastUpdatedTimestamp": entry["Timestamp"]} for entry in resources]}
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
                    {"ParameterKey": name, **_declaration(parameter)} for name, parameter in template.parameters.items()
                ],
                "ResourceTypes": sorted({resource.type for resource in template.resources.values()}),
            }
        )

    def validate_template(self) -> ActionResult:
        template = self._template(None)
        parameters = [
            {"ParameterKey": name, **_declaration(parameter)} for name, parameter in template.parameters.items()
        ]
        return ActionResult({"Parameters": parameters, "Description": template.description})

    def list_exports(self) -> ActionResult:
        exports = self._stacks.exports()
        return ActionResult(
            {
                "Exports": [
                    {"ExportingStackId": stack.id, "Name": name, "Value": value}
                    for name, (stack, value) in sorted(exports.items())
                ]
            }
        )

    def list_imports(self) -> ActionResult:
        return ActionResult({"Imports": self._stacks.users_of(self._get_param("ExportName"))})

    # Responses

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

    def _parameter_values(self, old: Stack | None) -> dict[str, str]:
        document = {}
        for entry in self._get_param("Parameters", []):
            name = entry["ParameterKey"]
            if entry.get("UsePreviousValue") in (True, "true"):
                if old is None or name not in old.parameter_values:
                    continue  # then its default applies
                document[name] = old.parameter_values[name]
            else:
                document[name] = entry.get("ParameterValue", "")
        return document

    def _tags(self) -> dict[str, str] | None:
        tags = self._get_param("Tags")
        return None if tags is None else {tag["Key"]: tag["Value"] for tag in tags}

    def _require_capabilities(self, template: Template) -> None:
        parameter_values = set(self._get_param("Capabilities", []))
        needed = [
            resource for resource in template.resources.values() if resource.type in (*_NAMED, "AWS::IAM::Policy")
        ]
        named = [entry for entry in needed if _NAME_OF.get(entry.type) in entry.properties]
        if (named and "CAPABILITY_NAMED_IAM" not in parameter_values) or (
            needed and not parameter_values & {"CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"}
        ):
            raise MissingCapability(f"Requires capabilities : [CAPABILITY_{'NAMED_' if named else ''}IAM]")


def _declaration(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "DefaultValue": body.get("Default"),
        "NoEcho": False,
        "ParameterType": body["Type"],
        "Description": body.get("Description"),
    }


def _parameters(stack: Stack, parameter_values: Mapping[str, str], template: Template) -> list[dict[str, str]]:
    result = []
    for name, parameter in template.parameters.items():
        value = parameter_values.get(name, parameter.get("Default", ""))
        resolved = stack.values.get(name) if parameter["Type"].startswith("AWS::SSM::") else None
        current = {"ParameterKey": name, "ParameterValue": str(value)}
        result.append(current | ({"ResolvedValue": str(resolved)} if resolved is not None else {}))
    return result


def _list_of_tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _stack(stack: Stack) -> dict[str, Any]:
    return {
        "StackId": stack.id,
        "StackName": stack.name,
        "Description": stack.template.description,
        "Parameters": _parameters(stack, stack.parameter_values, stack.template),
        "CreationTime": stack.created,
        "LastUpdatedTime": stack.updated,
        "DeletionTime": stack.deleted,
        "StackStatus": stack.status,
        "StackStatusReason": stack.reason,
        "DisableRollback": False,
        "NotificationARNs": [],
        "Capabilities": ["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"],
        "Outputs": [_output(output) for output in stack.outputs],
        "Tags": _list_of_tags(stack.tags),
        "EnableTerminationProtection": stack.protected,
        "TemplateDescription": stack.template.description,
    }


def _output(output: Output) -> dict[str, Any]:
    return {
        "OutputKey": output.key,
        "OutputValue": output.value,
        "Description": output.description,
        "ExportName": output.export,
    }


def _change_set(stack: Stack, change_set: ChangeSet) -> dict[str, Any]:
    return {
        "ChangeSetId": change_set.id,
        "ChangeSetName": change_set.name,
        "ChangeSetType": change_set.kind,
        "StackId": stack.id,
        "StackName": stack.name,
        "Description": change_set.description,
        "Parameters": _parameters(stack, change_set.parameter_values, change_set.template),
        "CreationTime": change_set.created,
        "ExecutionStatus": change_set.execution,
        "Status": change_set.status,
        "StatusReason": change_set.reason,
        "Tags": _list_of_tags(change_set.tags),
        "Changes": change_set.changes,
        "IncludeNestedStacks": False,
    }


def _resources(stack: Stack) -> list[dict[str, Any]]:
    return [
        {
            "StackName": stack.name,
            "StackId": stack.id,
            "LogicalResourceId": name,
            "PhysicalResourceId": resource.physical,
            "ResourceType": resource.declared.type,
            "Timestamp": resource.since,
            "ResourceStatus": resource.status,
            "Metadata": json.dumps({}),
        }
        for name, resource in stack.resources.items()
    ]
