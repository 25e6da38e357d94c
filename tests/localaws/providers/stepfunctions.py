"""State machines. Definitions are in JSONPath: nothing here speaks JSONata."""

import json

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, labels, listed, shaped


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

    def create(self, wanted: Properties, at: Site) -> Made:
        machines, name = at.client("stepfunctions"), wanted.get("StateMachineName") or at.name(80)
        kind = {"Type": wanted["StateMachineType"]} if "StateMachineType" in wanted else {}
        own = [{"key": key, "value": value} for key, value in labels(wanted).items()]
        given = {**_settings(wanted), **kind, "Name": name, "Tags": own}
        arn = machines.create_state_machine(**shaped(machines, "create_state_machine", given))["stateMachineArn"]
        return Made(arn, {"Arn": arn, "Name": name})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        machines = at.client("stepfunctions")
        given = {"StateMachineArn": made.id, **_settings(wanted)}
        machines.update_state_machine(**shaped(machines, "update_state_machine", given))
        if names := gone(before, wanted):
            machines.untag_resource(resourceArn=made.id, tagKeys=names)
        own = [{"key": key, "value": value} for key, value in labels(wanted).items()]
        machines.tag_resource(resourceArn=made.id, tags=own)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("stepfunctions").delete_state_machine(stateMachineArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        machines = at.client("stepfunctions")
        told = machines.describe_state_machine(stateMachineArn=made.id)
        own = {one["key"]: one["value"] for one in machines.list_tags_for_resource(resourceArn=made.id)["tags"]}
        return {
            **told,
            "Definition": json.loads(told["definition"]),
            "DefinitionString": told["definition"],
            "StateMachineName": told["name"],
            "StateMachineType": told["type"],
            "Tags": listed(own),
        }


def _settings(wanted: Properties) -> dict[str, object]:
    """What can be changed later."""
    definition = wanted.get("DefinitionString") or json.dumps(wanted["Definition"])
    same = ("EncryptionConfiguration", "LoggingConfiguration", "RoleArn", "TracingConfiguration")
    return {"Definition": definition, **{key: wanted[key] for key in same if key in wanted}}
