"""KMS keys, aliases, and parameters of Systems Manager."""

import json

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import tags


@provides
class Key(Provider):
    type = "AWS::KMS::Key"
    properties = frozenset(
        {
            "Description",
            "Enabled",
            "EnableKeyRotation",
            "KeyPolicy",
            "KeySpec",
            "KeyUsage",
            "PendingWindowInDays",
            "Tags",
        }
    )
    fixed = frozenset({"KeySpec", "KeyUsage"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        kms = site.client("kms")
        arguments = {key: desired[key] for key in ("Description", "KeySpec", "KeyUsage") if key in desired}
        key_metadata = kms.create_key(
            Policy=json.dumps(desired["KeyPolicy"]),
            Tags=[{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tags(desired)],
            **arguments,
        )["KeyMetadata"]
        resource = PhysicalResource(key_metadata["KeyId"], {"Arn": key_metadata["Arn"], "KeyId": key_metadata["KeyId"]})
        site.begin(resource)
        return self.update(
            resource, {"KeyPolicy": desired["KeyPolicy"], "Tags": desired.get("Tags", [])}, desired, site
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        kms = site.client("kms")
        if before["KeyPolicy"] != desired["KeyPolicy"]:
            kms.put_key_policy(KeyId=resource.id, PolicyName="default", Policy=json.dumps(desired["KeyPolicy"]))
        if before.get("Description", desired.get("Description")) != desired.get("Description"):
            kms.update_key_description(KeyId=resource.id, Description=desired.get("Description", ""))
        verb = kms.enable_key_rotation if _true(desired.get("EnableKeyRotation")) else kms.disable_key_rotation
        if _true(before.get("EnableKeyRotation")) != _true(desired.get("EnableKeyRotation")):
            verb(KeyId=resource.id)
        if _true(before.get("Enabled", True)) != _true(desired.get("Enabled", True)):
            (kms.enable_key if _true(desired.get("Enabled", True)) else kms.disable_key)(KeyId=resource.id)
        if tags(before) != tags(desired):
            kms.untag_resource(KeyId=resource.id, TagKeys=[tag["Key"] for tag in tags(before)])
            states = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tags(desired)]
            kms.tag_resource(KeyId=resource.id, Tags=states)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        days = int(properties.get("PendingWindowInDays", 30))
        site.client("kms").schedule_key_deletion(KeyId=resource.id, PendingWindowInDays=days)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        kms = site.client("kms")
        key_metadata = kms.describe_key(KeyId=resource.id)["KeyMetadata"]
        labels = kms.list_resource_tags(KeyId=resource.id)["Tags"]
        return {
            **key_metadata,
            "EnableKeyRotation": kms.get_key_rotation_status(KeyId=resource.id)["KeyRotationEnabled"],
            "KeyPolicy": json.loads(kms.get_key_policy(KeyId=resource.id, PolicyName="default")["Policy"]),
            "Tags": [{"Key": tag["TagKey"], "Value": tag["TagValue"]} for tag in labels],
        }


def _true(value: object) -> bool:
    return str(value).lower() == "true"


@provides
class Alias(Provider):
    type = "AWS::KMS::Alias"
    properties = frozenset({"AliasName", "TargetKeyId"})
    fixed = frozenset({"AliasName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        site.client("kms").create_alias(AliasName=desired["AliasName"], TargetKeyId=desired["TargetKeyId"])
        return PhysicalResource(desired["AliasName"])

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        site.client("kms").update_alias(AliasName=resource.id, TargetKeyId=desired["TargetKeyId"])
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("kms").delete_alias(AliasName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        key_metadata = site.client("kms").describe_key(KeyId=resource.id)["KeyMetadata"]
        return {"AliasName": resource.id, "TargetKeyId": key_metadata["Arn"]}


@provides
class Parameter(Provider):
    type = "AWS::SSM::Parameter"
    properties = frozenset({"AllowedPattern", "DataType", "Description", "Name", "Tags", "Tier", "Type", "Value"})
    fixed = frozenset({"Name"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("Name") or site.name(128)
        arguments = {
            key: desired[key] for key in ("AllowedPattern", "DataType", "Description", "Tier") if key in desired
        }
        site.client("ssm").put_parameter(
            Name=name, Value=desired["Value"], Type=desired["Type"], Tags=tags(desired), **arguments
        )
        return PhysicalResource(name, {"Value": desired["Value"], "Type": desired["Type"]})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        arguments = {
            key: desired[key] for key in ("AllowedPattern", "DataType", "Description", "Tier") if key in desired
        }
        site.client("ssm").put_parameter(
            Name=resource.id, Value=desired["Value"], Type=desired["Type"], Overwrite=True, **arguments
        )
        return PhysicalResource(resource.id, {"Value": desired["Value"], "Type": desired["Type"]})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ssm").delete_parameter(Name=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        ssm = site.client("ssm")
        parameter = ssm.describe_parameters(ParameterFilters=[{"Key": "Name", "Values": [resource.id]}])["Parameters"][
            0
        ]
        labels = ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=resource.id)["TagList"]
        value = ssm.get_parameter(Name=resource.id)["Parameter"]["Value"]
        return {**parameter, "Value": value, "Tags": {tag["Key"]: tag["Value"] for tag in labels}}
