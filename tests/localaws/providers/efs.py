"""EFS file systems, access points and mount targets."""

import json
from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import removed_tags, shaped, tags


@provides
class FileSystem(Provider):
    type = "AWS::EFS::FileSystem"
    properties = frozenset(
        {
            "AvailabilityZoneName",
            "BackupPolicy",
            "Encrypted",
            "FileSystemPolicy",
            "FileSystemTags",
            "KmsKeyId",
            "LifecyclePolicies",
            "PerformanceMode",
            "ProvisionedThroughputInMibps",
            "ThroughputMode",
        }
    )
    fixed = frozenset({"AvailabilityZoneName", "Encrypted", "KmsKeyId", "PerformanceMode"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        efs = site.client("efs")
        own = {"BackupPolicy", "FileSystemPolicy", "FileSystemTags", "LifecyclePolicies"}
        arguments = shaped(efs, "create_file_system", desired, exclude=frozenset(own))
        response = efs.create_file_system(CreationToken=site.name(64), Tags=_tags(desired), **arguments)
        resource = PhysicalResource(
            response["FileSystemId"], {"Arn": response["FileSystemArn"], "FileSystemId": response["FileSystemId"]}
        )
        site.begin(resource)
        self._settings(efs, resource.id, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        efs = site.client("efs")
        speed = {key: desired[key] for key in ("ThroughputMode", "ProvisionedThroughputInMibps") if key in desired}
        efs.update_file_system(**shaped(efs, "update_file_system", {"FileSystemId": resource.id, **speed}))
        self._settings(efs, resource.id, before, desired)
        if names := removed_tags(before, desired, "FileSystemTags"):
            efs.untag_resource(ResourceId=resource.id, TagKeys=names)
        efs.tag_resource(ResourceId=resource.id, Tags=_tags(desired))
        return resource

    def _settings(self, efs: Any, id_: str, before: Properties, desired: Properties) -> None:
        """Set the settings with calls of their own. A removed setting goes back to the default of a new file system."""
        if before.get("LifecyclePolicies", []) != (policies := desired.get("LifecyclePolicies", [])):
            efs.put_lifecycle_configuration(FileSystemId=id_, LifecyclePolicies=policies)
        if before.get("BackupPolicy") != desired.get("BackupPolicy"):
            efs.put_backup_policy(FileSystemId=id_, BackupPolicy=desired.get("BackupPolicy", {"Status": "DISABLED"}))
        if before.get("FileSystemPolicy") != (policy := desired.get("FileSystemPolicy")):
            if policy is None:
                efs.delete_file_system_policy(FileSystemId=id_)
            else:
                efs.put_file_system_policy(FileSystemId=id_, Policy=json.dumps(policy))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("efs").delete_file_system(FileSystemId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        efs = site.client("efs")
        actual: dict[str, Any] = dict(efs.describe_file_systems(FileSystemId=resource.id)["FileSystems"][0])
        actual["FileSystemTags"] = actual["Tags"]
        rules = efs.describe_lifecycle_configuration(FileSystemId=resource.id)
        actual["LifecyclePolicies"] = rules["LifecyclePolicies"]
        try:
            actual["BackupPolicy"] = efs.describe_backup_policy(FileSystemId=resource.id)["BackupPolicy"]
        except efs.exceptions.PolicyNotFound:
            actual["BackupPolicy"] = None
        try:
            policy = efs.describe_file_system_policy(FileSystemId=resource.id)["Policy"]
            actual["FileSystemPolicy"] = json.loads(policy)
        except efs.exceptions.PolicyNotFound:
            actual["FileSystemPolicy"] = None
        return actual


def _tags(desired: Properties) -> list[dict[str, str]]:
    return tags({"Tags": desired.get("FileSystemTags", [])})


@provides
class AccessPoint(Provider):
    type = "AWS::EFS::AccessPoint"
    properties = frozenset({"AccessPointTags", "ClientToken", "FileSystemId", "PosixUser", "RootDirectory"})
    fixed = frozenset({"ClientToken", "FileSystemId", "PosixUser", "RootDirectory"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        efs = site.client("efs")
        arguments = {"ClientToken": site.name(64), **desired, "Tags": desired.get("AccessPointTags", [])}
        response = efs.create_access_point(
            **shaped(efs, "create_access_point", arguments, exclude=frozenset({"AccessPointTags"}))
        )
        return PhysicalResource(
            response["AccessPointId"], {"AccessPointId": response["AccessPointId"], "Arn": response["AccessPointArn"]}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        efs = site.client("efs")
        if names := removed_tags(before, desired, "AccessPointTags"):
            efs.untag_resource(ResourceId=resource.id, TagKeys=names)
        efs.tag_resource(ResourceId=resource.id, Tags=desired.get("AccessPointTags", []))
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("efs").delete_access_point(AccessPointId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        access_point = site.client("efs").describe_access_points(AccessPointId=resource.id)["AccessPoints"][0]
        return {**access_point, "AccessPointTags": access_point["Tags"]}


@provides
class MountTarget(Provider):
    type = "AWS::EFS::MountTarget"
    properties = frozenset({"FileSystemId", "IpAddress", "SecurityGroups", "SubnetId"})
    fixed = frozenset({"FileSystemId", "IpAddress", "SubnetId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        efs = site.client("efs")
        response = efs.create_mount_target(**shaped(efs, "create_mount_target", desired))
        return PhysicalResource(
            response["MountTargetId"], {"Id": response["MountTargetId"], "IpAddress": response["IpAddress"]}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        site.client("efs").modify_mount_target_security_groups(
            MountTargetId=resource.id, SecurityGroups=desired["SecurityGroups"]
        )
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("efs").delete_mount_target(MountTargetId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        efs = site.client("efs")
        mount_target = efs.describe_mount_targets(MountTargetId=resource.id)["MountTargets"][0]
        groups = efs.describe_mount_target_security_groups(MountTargetId=resource.id)["SecurityGroups"]
        return {**mount_target, "SecurityGroups": groups}
