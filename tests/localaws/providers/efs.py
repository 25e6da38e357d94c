"""File systems that instances share, and the ways into them."""

import json
from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, shaped, tags


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

    def create(self, wanted: Properties, at: Site) -> Made:
        efs = at.client("efs")
        own = {"BackupPolicy", "FileSystemPolicy", "FileSystemTags", "LifecyclePolicies"}
        given = shaped(efs, "create_file_system", wanted, but=frozenset(own))
        told = efs.create_file_system(CreationToken=at.name(64), Tags=_tags(wanted), **given)
        made = Made(told["FileSystemId"], {"Arn": told["FileSystemArn"], "FileSystemId": told["FileSystemId"]})
        at.begin(made)
        self._settings(efs, made.id, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        efs = at.client("efs")
        speed = {key: wanted[key] for key in ("ThroughputMode", "ProvisionedThroughputInMibps") if key in wanted}
        efs.update_file_system(**shaped(efs, "update_file_system", {"FileSystemId": made.id, **speed}))
        self._settings(efs, made.id, before, wanted)
        if names := gone(before, wanted, "FileSystemTags"):
            efs.untag_resource(ResourceId=made.id, TagKeys=names)
        efs.tag_resource(ResourceId=made.id, Tags=_tags(wanted))
        return made

    def _settings(self, efs: Any, id_: str, before: Properties, wanted: Properties) -> None:
        """What has calls of its own. A setting that is no longer wanted goes back to what a new file system has."""
        if before.get("LifecyclePolicies", []) != (policies := wanted.get("LifecyclePolicies", [])):
            efs.put_lifecycle_configuration(FileSystemId=id_, LifecyclePolicies=policies)
        if before.get("BackupPolicy") != wanted.get("BackupPolicy"):
            efs.put_backup_policy(FileSystemId=id_, BackupPolicy=wanted.get("BackupPolicy", {"Status": "DISABLED"}))
        if before.get("FileSystemPolicy") != (policy := wanted.get("FileSystemPolicy")):
            if policy is None:
                efs.delete_file_system_policy(FileSystemId=id_)
            else:
                efs.put_file_system_policy(FileSystemId=id_, Policy=json.dumps(policy))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("efs").delete_file_system(FileSystemId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        efs = at.client("efs")
        found: dict[str, Any] = dict(efs.describe_file_systems(FileSystemId=made.id)["FileSystems"][0])
        found["FileSystemTags"] = found["Tags"]
        rules = efs.describe_lifecycle_configuration(FileSystemId=made.id)
        found["LifecyclePolicies"] = rules["LifecyclePolicies"]
        try:
            found["BackupPolicy"] = efs.describe_backup_policy(FileSystemId=made.id)["BackupPolicy"]
        except efs.exceptions.PolicyNotFound:
            found["BackupPolicy"] = None
        try:
            policy = efs.describe_file_system_policy(FileSystemId=made.id)["Policy"]
            found["FileSystemPolicy"] = json.loads(policy)
        except efs.exceptions.PolicyNotFound:
            found["FileSystemPolicy"] = None
        return found


def _tags(wanted: Properties) -> list[dict[str, str]]:
    return tags({"Tags": wanted.get("FileSystemTags", [])})


@provides
class AccessPoint(Provider):
    type = "AWS::EFS::AccessPoint"
    properties = frozenset({"AccessPointTags", "ClientToken", "FileSystemId", "PosixUser", "RootDirectory"})
    fixed = frozenset({"ClientToken", "FileSystemId", "PosixUser", "RootDirectory"})

    def create(self, wanted: Properties, at: Site) -> Made:
        efs = at.client("efs")
        given = {"ClientToken": at.name(64), **wanted, "Tags": wanted.get("AccessPointTags", [])}
        told = efs.create_access_point(**shaped(efs, "create_access_point", given, but=frozenset({"AccessPointTags"})))
        return Made(told["AccessPointId"], {"AccessPointId": told["AccessPointId"], "Arn": told["AccessPointArn"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        efs = at.client("efs")
        if names := gone(before, wanted, "AccessPointTags"):
            efs.untag_resource(ResourceId=made.id, TagKeys=names)
        efs.tag_resource(ResourceId=made.id, Tags=wanted.get("AccessPointTags", []))
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("efs").delete_access_point(AccessPointId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("efs").describe_access_points(AccessPointId=made.id)["AccessPoints"][0]
        return {**told, "AccessPointTags": told["Tags"]}


@provides
class MountTarget(Provider):
    type = "AWS::EFS::MountTarget"
    properties = frozenset({"FileSystemId", "IpAddress", "SecurityGroups", "SubnetId"})
    fixed = frozenset({"FileSystemId", "IpAddress", "SubnetId"})

    def create(self, wanted: Properties, at: Site) -> Made:
        efs = at.client("efs")
        told = efs.create_mount_target(**shaped(efs, "create_mount_target", wanted))
        return Made(told["MountTargetId"], {"Id": told["MountTargetId"], "IpAddress": told["IpAddress"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        at.client("efs").modify_mount_target_security_groups(
            MountTargetId=made.id, SecurityGroups=wanted["SecurityGroups"]
        )
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("efs").delete_mount_target(MountTargetId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        efs = at.client("efs")
        told = efs.describe_mount_targets(MountTargetId=made.id)["MountTargets"][0]
        groups = efs.describe_mount_target_security_groups(MountTargetId=made.id)["SecurityGroups"]
        return {**told, "SecurityGroups": groups}
