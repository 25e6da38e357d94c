"""What instances are launched by, and where they find room: templates, placement groups, reservations."""

from typing import Any, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags
from tests.localaws.providers.network import retag, specified


def _label(properties: Properties, kind: str) -> Properties:
    """The tags of a resource whose template gives them as a specification."""
    given = properties.get("TagSpecifications", [])
    return {"Tags": [tag for each in given if each["ResourceType"] == kind for tag in tags(each)]}


@provides
class LaunchTemplate(Provider):
    """A change of the data is a new version; the default version stays, as it does with CloudFormation."""

    type = "AWS::EC2::LaunchTemplate"
    properties = frozenset({"LaunchTemplateData", "LaunchTemplateName", "TagSpecifications", "VersionDescription"})
    fixed = frozenset({"LaunchTemplateName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        named = {"LaunchTemplateName": at.name(128), **wanted}
        told = ec2.create_launch_template(**shaped(ec2, "create_launch_template", named))["LaunchTemplate"]
        return self._made(ec2, told["LaunchTemplateId"])

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        parts = ("LaunchTemplateData", "VersionDescription")
        if any(before.get(name) != wanted.get(name) for name in parts):
            given = {"LaunchTemplateId": made.id} | {name: wanted[name] for name in parts if name in wanted}
            ec2.create_launch_template_version(**shaped(ec2, "create_launch_template_version", given))
        retag(ec2, made.id, _label(before, "launch-template"), _label(wanted, "launch-template"))
        return self._made(ec2, made.id)

    def _made(self, ec2: Any, id_: str) -> Made:
        told = ec2.describe_launch_templates(LaunchTemplateIds=[id_])["LaunchTemplates"][0]
        numbers = {name: str(told[name]) for name in ("DefaultVersionNumber", "LatestVersionNumber")}
        return Made(id_, {"LaunchTemplateId": id_, **numbers})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").delete_launch_template(LaunchTemplateId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        ec2 = at.client("ec2")
        given = {"LaunchTemplateId": made.id, "Versions": ["$Latest"]}
        told = ec2.describe_launch_template_versions(**given)["LaunchTemplateVersions"][0]
        label = ec2.describe_launch_templates(LaunchTemplateIds=[made.id])["LaunchTemplates"][0].get("Tags", [])
        return {**told, "TagSpecifications": [{"ResourceType": "launch-template", "Tags": label}]}


@provides
class PlacementGroup(Provider):
    type = "AWS::EC2::PlacementGroup"
    properties = frozenset({"PartitionCount", "SpreadLevel", "Strategy", "Tags"})
    fixed = properties

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        given = shaped(ec2, "create_placement_group", {**wanted, "GroupName": at.name(255)}, but=frozenset({"Tags"}))
        told = ec2.create_placement_group(**given, **specified("placement-group", wanted))["PlacementGroup"]
        return Made(told["GroupName"], {"GroupId": told["GroupId"], "GroupName": told["GroupName"]})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").delete_placement_group(GroupName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("ec2").describe_placement_groups(GroupNames=[made.id])["PlacementGroups"]
        found: dict[str, Any] = told[0]
        return found


@provides
class CapacityReservation(Provider):
    type = "AWS::EC2::CapacityReservation"
    properties = frozenset(
        {
            "AvailabilityZone",
            "EbsOptimized",
            "EndDate",
            "EndDateType",
            "InstanceCount",
            "InstanceMatchCriteria",
            "InstancePlatform",
            "InstanceType",
            "PlacementGroupArn",
            "TagSpecifications",
            "Tenancy",
        }
    )
    fixed = frozenset(
        {"AvailabilityZone", "EbsOptimized", "InstancePlatform", "InstanceType", "PlacementGroupArn", "Tenancy"}
    )
    _CHANGES: Final = ("EndDate", "EndDateType", "InstanceCount", "InstanceMatchCriteria")

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        told = ec2.create_capacity_reservation(**shaped(ec2, "create_capacity_reservation", wanted))
        return self._made(ec2, told["CapacityReservation"]["CapacityReservationId"])

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        changed = {name: wanted[name] for name in self._CHANGES if name in wanted and wanted[name] != before.get(name)}
        if "EndDate" in before and "EndDate" not in wanted:
            changed["EndDateType"] = "unlimited"
        given = shaped(ec2, "modify_capacity_reservation", {"CapacityReservationId": made.id, **changed})
        ec2.modify_capacity_reservation(**given)
        retag(ec2, made.id, _label(before, "capacity-reservation"), _label(wanted, "capacity-reservation"))
        return self._made(ec2, made.id)

    def _made(self, ec2: Any, id_: str) -> Made:
        told = ec2.describe_capacity_reservations(CapacityReservationIds=[id_])["CapacityReservations"][0]
        names = ("AvailabilityZone", "AvailableInstanceCount", "CapacityReservationArn", "InstanceType", "State")
        found = {name: told[name] for name in (*names, "OwnerId", "Tenancy", "TotalInstanceCount")}
        return Made(id_, {"Id": id_, **found})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").cancel_capacity_reservation(CapacityReservationId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("ec2").describe_capacity_reservations(CapacityReservationIds=[made.id])
        found = told["CapacityReservations"][0]
        label = [{"ResourceType": "capacity-reservation", "Tags": found["Tags"]}]
        return {**found, "InstanceCount": found["TotalInstanceCount"], "TagSpecifications": label}
