"""State machines. Definitions use JSONPath; JSONata is not supported."""

import json

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import labels, listed, removed_tags, shaped


@provides
class StateMachine(Provider):
    type = "AWS::StepFunctions::StateMachine"
    properties = frozenset(
        {
            "Definition",
            "DefinitionString",
            "EncryptionConfiguration",
            "LoggingConfiguration",
            "RoleArn",
            "StateMachineName",
            "StateMachineType",
            "Tags",
            "TracingConfiguration",
        }
    )
    fixed = frozenset({"StateMachineName", "StateMachineType"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        machines, name = site.client("stepfunctions"), desired.get("StateMachineName") or site.name(80)
        kind = {"Type": desired["StateMachineType"]} if "StateMachineType" in desired else {}
        own = [{"key": key, "value": value} for key, value in labels(desired).items()]
        arguments = {**_settings(desired), **kind, "Name": name, "Tags": own}
        arn = machines.create_state_machine(**shaped(machines, "create_state_machine", arguments))["stateMachineArn"]
        return PhysicalResource(arn, {"Arn": arn, "Name": name})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        machines = site.client("stepfunctions")
        arguments = {"StateMachineArn": resource.id, **_settings(desired)}
        machines.update_state_machine(**shaped(machines, "update_state_machine", arguments))
        if names := removed_tags(before, desired):
            machines.untag_resource(resourceArn=resource.id, tagKeys=names)
        own = [{"key": key, "value": value} for key, value in labels(desired).items()]
        machines.tag_resource(resourceArn=resource.id, tags=own)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("stepfunctions").delete_state_machine(stateMachineArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        machines = site.client("stepfunctions")
        response = machines.describe_state_machine(stateMachineArn=resource.id)
        own = {tag["key"]: tag["value"] for tag in machines.list_tags_for_resource(resourceArn=resource.id)["tags"]}
        return {
            **response,
            "Definition": json.loads(response["definition"]),
            "DefinitionString": response["definition"],
            "StateMachineName": response["name"],
            "StateMachineType": response["type"],
            "Tags": listed(own),
        }


def _settings(desired: Properties) -> dict[str, object]:
    """The settings that can change."""
    definition = desired.get("DefinitionString") or json.dumps(desired["Definition"])
    same = ("EncryptionConfiguration", "LoggingConfiguration", "RoleArn", "TracingConfiguration")
    return {"Definition": definition, **{key: desired[key] for key in same if key in desired}}
