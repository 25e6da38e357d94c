"""Launch templates, placement groups and capacity reservations."""

from typing import Any, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags
from tests.localaws.providers.network import retag, specified


def _label(properties: Properties, kind: str) -> Properties:
    """The tags of a resource whose template has tag specifications."""
    arguments = properties.get("TagSpecifications", [])
    return {"Tags": [tag for argument in arguments if argument["ResourceType"] == kind for tag in tags(argument)]}


@provides
class LaunchTemplate(Provider):
    """A launch template. A change of the data creates a version; the default version stays, as with CloudFormation."""

    type = "AWS::EC2::LaunchTemplate"
    properties = frozenset({"LaunchTemplateData", "LaunchTemplateName", "TagSpecifications", "VersionDescription"})
    fixed = frozenset({"LaunchTemplateName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        named = {"LaunchTemplateName": site.name(128), **desired}
        launch_template = ec2.create_launch_template(**shaped(ec2, "create_launch_template", named))["LaunchTemplate"]
        return self._physical_resource(ec2, launch_template["LaunchTemplateId"])

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ec2 = site.client("ec2")
        parts = ("LaunchTemplateData", "VersionDescription")
        if any(before.get(name) != desired.get(name) for name in parts):
            arguments = {"LaunchTemplateId": resource.id} | {name: desired[name] for name in parts if name in desired}
            ec2.create_launch_template_version(**shaped(ec2, "create_launch_template_version", arguments))
        retag(ec2, resource.id, _label(before, "launch-template"), _label(desired, "launch-template"))
        return self._physical_resource(ec2, resource.id)

    def _physical_resource(self, ec2: Any, id_: str) -> PhysicalResource:
        launch_template = ec2.describe_launch_templates(LaunchTemplateIds=[id_])["LaunchTemplates"][0]
        numbers = {name: str(launch_template[name]) for name in ("DefaultVersionNumber", "LatestVersionNumber")}
        return PhysicalResource(id_, {"LaunchTemplateId": id_, **numbers})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").delete_launch_template(LaunchTemplateId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        ec2 = site.client("ec2")
        arguments = {"LaunchTemplateId": resource.id, "Versions": ["$Latest"]}
        launch_template_version = ec2.describe_launch_template_versions(**arguments)["LaunchTemplateVersions"][0]
        label = ec2.describe_launch_templates(LaunchTemplateIds=[resource.id])["LaunchTemplates"][0].get("Tags", [])
        return {**launch_template_version, "TagSpecifications": [{"ResourceType": "launch-template", "Tags": label}]}


@provides
class PlacementGroup(Provider):
    type = "AWS::EC2::PlacementGroup"
    properties = frozenset({"PartitionCount", "SpreadLevel", "Strategy", "Tags"})
    fixed = properties

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        arguments = shaped(
            ec2, "create_placement_group", {**desired, "GroupName": site.name(255)}, exclude=frozenset({"Tags"})
        )
        placement_group = ec2.create_placement_group(**arguments, **specified("placement-group", desired))[
            "PlacementGroup"
        ]
        return PhysicalResource(
            placement_group["GroupName"],
            {"GroupId": placement_group["GroupId"], "GroupName": placement_group["GroupName"]},
        )

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").delete_placement_group(GroupName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        placement_groups = site.client("ec2").describe_placement_groups(GroupNames=[resource.id])["PlacementGroups"]
        actual: dict[str, Any] = placement_groups[0]
        return actual


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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        response = ec2.create_capacity_reservation(**shaped(ec2, "create_capacity_reservation", desired))
        return self._physical_resource(ec2, response["CapacityReservation"]["CapacityReservationId"])

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ec2 = site.client("ec2")
        changed = {
            name: desired[name] for name in self._CHANGES if name in desired and desired[name] != before.get(name)
        }
        if "EndDate" in before and "EndDate" not in desired:
            changed["EndDateType"] = "unlimited"
        arguments = shaped(ec2, "modify_capacity_reservation", {"CapacityReservationId": resource.id, **changed})
        ec2.modify_capacity_reservation(**arguments)
        retag(ec2, resource.id, _label(before, "capacity-reservation"), _label(desired, "capacity-reservation"))
        return self._physical_resource(ec2, resource.id)

    def _physical_resource(self, ec2: Any, id_: str) -> PhysicalResource:
        capacity_reservation = ec2.describe_capacity_reservations(CapacityReservationIds=[id_])["CapacityReservations"][
            0
        ]
        names = ("AvailabilityZone", "AvailableInstanceCount", "CapacityReservationArn", "InstanceType", "State")
        result = {name: capacity_reservation[name] for name in (*names, "OwnerId", "Tenancy", "TotalInstanceCount")}
        return PhysicalResource(id_, {"Id": id_, **result})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").cancel_capacity_reservation(CapacityReservationId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("ec2").describe_capacity_reservations(CapacityReservationIds=[resource.id])
        actual = response["CapacityReservations"][0]
        label = [{"ResourceType": "capacity-reservation", "Tags": actual["Tags"]}]
        return {**actual, "InstanceCount": actual["TotalInstanceCount"], "TagSpecifications": label}
