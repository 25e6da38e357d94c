"""Scratch of a training fleet: FSx for Lustre beside its nodes, gone with the fleet, and how hosts mount it."""

from typing import Final

from aws_cdk import RemovalPolicy, aws_ec2, aws_fsx
from constructs import Construct

from nxpipe.pipeline.config.fleets import Scratch
from nxpipe.stacks.user_data.script import part_text

FOLDER: Final = "/scratch"  # on hosts and in containers
_BOUNDARY: Final = "=nxpipe="


def file_system(
    scope: Construct, name: str, scratch: Scratch, subnet: aws_ec2.ISubnet, group: aws_ec2.ISecurityGroup
) -> aws_fsx.CfnFileSystem:
    """In the group of the nodes, whose members let all traffic of each other through."""
    made = aws_fsx.CfnFileSystem(
        scope,
        "Scratch",
        file_system_type="LUSTRE",
        file_system_type_version="2.15",
        storage_capacity=scratch.size,
        subnet_ids=[subnet.subnet_id],
        security_group_ids=[group.security_group_id],
        lustre_configuration=aws_fsx.CfnFileSystem.LustreConfigurationProperty(
            deployment_type="SCRATCH_2", data_compression_type="LZ4"
        ),
        tags=[{"key": "Name", "value": f"{name}-scratch"}],
    )
    made.apply_removal_policy(RemovalPolicy.DESTROY)
    return made


def mounted(made: aws_fsx.CfnFileSystem) -> str:
    """User data in parts, as Batch wants it, which adds a part of its own."""
    variables = {"SCRATCH": FOLDER, "FILE_SYSTEM": made.attr_dns_name, "MOUNT_NAME": made.attr_lustre_mount_name}
    return "\n".join(
        [
            "MIME-Version: 1.0",
            f'Content-Type: multipart/mixed; boundary="{_BOUNDARY}"',
            "",
            f"--{_BOUNDARY}",
            'Content-Type: text/x-shellscript; charset="us-ascii"',
            "",
            "#!/usr/bin/env bash",
            "set -Eeuo pipefail",
            *(f"{name}={value}" for name, value in variables.items()),
            part_text("scratch"),
            f"--{_BOUNDARY}--",
            "",
        ]
    )
