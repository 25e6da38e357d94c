"""Cases of EFS and FSx."""

from typing import Final

from tests.localaws.cases.case import DENIAL, NETWORK, Case, ref, tags

_FILES: Final = {"Files": {"Type": "AWS::EFS::FileSystem", "Properties": {"Encrypted": True}}}


CASES: Final = (
    Case(
        "AWS::EFS::FileSystem",
        {
            "BackupPolicy": {"Status": "ENABLED"},
            "Encrypted": True,
            "FileSystemPolicy": DENIAL,
            "FileSystemTags": tags(Name="cache", old="x"),
            "KmsKeyId": "arn:aws:kms:us-east-2:123456789012:key/5b4e9d5c-0000-4000-8000-000000000000",
            "LifecyclePolicies": [{"TransitionToIA": "AFTER_30_DAYS"}],
            "PerformanceMode": "generalPurpose",
            "ThroughputMode": "elastic",
        },
        {
            "BackupPolicy": {"Status": "DISABLED"},
            "FileSystemTags": tags(Name="cache", new="y"),
            "LifecyclePolicies": [{"TransitionToIA": "AFTER_7_DAYS"}],
            "ProvisionedThroughputInMibps": 64,
            "ThroughputMode": "provisioned",
        },
        removed=("FileSystemPolicy",),
    ),
    Case(
        "AWS::EFS::FileSystem",
        {"AvailabilityZoneName": "us-east-2a", "Encrypted": True},
        {"FileSystemPolicy": DENIAL},
    ),
    Case(
        "AWS::EFS::AccessPoint",
        {
            "AccessPointTags": tags(a="1"),
            "FileSystemId": ref("Files"),
            "PosixUser": {"Uid": "1000", "Gid": "1000"},
            "RootDirectory": {
                "Path": "/neff/2.19",
                "CreationInfo": {"OwnerUid": "1000", "OwnerGid": "1000", "Permissions": "0750"},
            },
        },
        {"AccessPointTags": tags(b="2")},
        _FILES,
    ),
    Case(
        "AWS::EFS::MountTarget",
        {"FileSystemId": ref("Files"), "SubnetId": ref("A"), "SecurityGroups": [ref("Group")]},
        {"SecurityGroups": [ref("Other")]},
        {**_FILES, **NETWORK},
    ),
    Case(
        "AWS::FSx::FileSystem",
        {
            "FileSystemType": "LUSTRE",
            "FileSystemTypeVersion": "2.15",
            "LustreConfiguration": {"DeploymentType": "SCRATCH_2", "DataCompressionType": "LZ4"},
            "SecurityGroupIds": [ref("Group")],
            "StorageCapacity": 1200,
            "StorageType": "SSD",
            "SubnetIds": [ref("A")],
            "Tags": tags(a="1"),
        },
        {"Tags": tags(b="1")},
        NETWORK,
    ),
)
