"""KMS keys and their aliases, and parameters of Systems Manager."""

import json

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
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

    def create(self, wanted: Properties, at: Site) -> Made:
        kms = at.client("kms")
        given = {key: wanted[key] for key in ("Description", "KeySpec", "KeyUsage") if key in wanted}
        told = kms.create_key(
            Policy=json.dumps(wanted["KeyPolicy"]),
            Tags=[{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tags(wanted)],
            **given,
        )["KeyMetadata"]
        made = Made(told["KeyId"], {"Arn": told["Arn"], "KeyId": told["KeyId"]})
        at.begin(made)
        return self.update(made, {"KeyPolicy": wanted["KeyPolicy"], "Tags": wanted.get("Tags", [])}, wanted, at)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        kms = at.client("kms")
        if before["KeyPolicy"] != wanted["KeyPolicy"]:
            kms.put_key_policy(KeyId=made.id, PolicyName="default", Policy=json.dumps(wanted["KeyPolicy"]))
        if before.get("Description", wanted.get("Description")) != wanted.get("Description"):
            kms.update_key_description(KeyId=made.id, Description=wanted.get("Description", ""))
        turn = kms.enable_key_rotation if _true(wanted.get("EnableKeyRotation")) else kms.disable_key_rotation
        if _true(before.get("EnableKeyRotation")) != _true(wanted.get("EnableKeyRotation")):
            turn(KeyId=made.id)
        if _true(before.get("Enabled", True)) != _true(wanted.get("Enabled", True)):
            (kms.enable_key if _true(wanted.get("Enabled", True)) else kms.disable_key)(KeyId=made.id)
        if tags(before) != tags(wanted):
            kms.untag_resource(KeyId=made.id, TagKeys=[tag["Key"] for tag in tags(before)])
            both = [{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in tags(wanted)]
            kms.tag_resource(KeyId=made.id, Tags=both)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        days = int(properties.get("PendingWindowInDays", 30))
        at.client("kms").schedule_key_deletion(KeyId=made.id, PendingWindowInDays=days)

    def read(self, made: Made, at: Site) -> Properties:
        kms = at.client("kms")
        told = kms.describe_key(KeyId=made.id)["KeyMetadata"]
        labels = kms.list_resource_tags(KeyId=made.id)["Tags"]
        return {
            **told,
            "EnableKeyRotation": kms.get_key_rotation_status(KeyId=made.id)["KeyRotationEnabled"],
            "KeyPolicy": json.loads(kms.get_key_policy(KeyId=made.id, PolicyName="default")["Policy"]),
            "Tags": [{"Key": tag["TagKey"], "Value": tag["TagValue"]} for tag in labels],
        }


def _true(value: object) -> bool:
    return str(value).lower() == "true"


@provides
class Alias(Provider):
    type = "AWS::KMS::Alias"
    properties = frozenset({"AliasName", "TargetKeyId"})
    fixed = frozenset({"AliasName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        at.client("kms").create_alias(AliasName=wanted["AliasName"], TargetKeyId=wanted["TargetKeyId"])
        return Made(wanted["AliasName"])

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        at.client("kms").update_alias(AliasName=made.id, TargetKeyId=wanted["TargetKeyId"])
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("kms").delete_alias(AliasName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("kms").describe_key(KeyId=made.id)["KeyMetadata"]
        return {"AliasName": made.id, "TargetKeyId": told["Arn"]}


@provides
class Parameter(Provider):
    type = "AWS::SSM::Parameter"
    properties = frozenset({"AllowedPattern", "DataType", "Description", "Name", "Tags", "Tier", "Type", "Value"})
    fixed = frozenset({"Name"})

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("Name") or at.name(128)
        given = {key: wanted[key] for key in ("AllowedPattern", "DataType", "Description", "Tier") if key in wanted}
        at.client("ssm").put_parameter(
            Name=name, Value=wanted["Value"], Type=wanted["Type"], Tags=tags(wanted), **given
        )
        return Made(name, {"Value": wanted["Value"], "Type": wanted["Type"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        given = {key: wanted[key] for key in ("AllowedPattern", "DataType", "Description", "Tier") if key in wanted}
        at.client("ssm").put_parameter(
            Name=made.id, Value=wanted["Value"], Type=wanted["Type"], Overwrite=True, **given
        )
        return Made(made.id, {"Value": wanted["Value"], "Type": wanted["Type"]})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ssm").delete_parameter(Name=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        ssm = at.client("ssm")
        told = ssm.describe_parameters(ParameterFilters=[{"Key": "Name", "Values": [made.id]}])["Parameters"][0]
        labels = ssm.list_tags_for_resource(ResourceType="Parameter", ResourceId=made.id)["TagList"]
        value = ssm.get_parameter(Name=made.id)["Parameter"]["Value"]
        return {**told, "Value": value, "Tags": {tag["Key"]: tag["Value"] for tag in labels}}
