"""Compile cache stack: an EFS file system with one access point for each version of the Neuron SDK.

The bucket also holds everything in the cache, so this stack may be destroyed and created again at any time.
"""

from typing import Any, Final

from aws_cdk import CfnOutput, RemovalPolicy, Stack, aws_ec2, aws_efs, aws_iam
from constructs import Construct

from nxpipe.stacks.handles import CacheHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.project import tag_project

# All clients act as this user, so an instance may replace files that another instance wrote.
_OWNER: Final = "7200"


class CacheStack(Stack):
    """File system that clients mount with TLS and IAM, through the access point of one SDK version only."""

    handle: CacheHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        network: NetworkHandle,
        store: StoreHandle,
        versions: tuple[str, ...],
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, id_, description=f"Compile cache of {project}", **kwargs)
        group = self._make_group(project, network)
        file_system = self._make_file_system(project, network, store, group)
        points = {version: self._make_access_point(file_system, version) for version in versions}
        self.handle = CacheHandle(file_system=file_system, group=group, access_points=points)
        tag_project(self, project)
        CfnOutput(
            self, "FileSystemId", value=file_system.file_system_id, description="File system of compiled programs"
        )

    def _make_group(self, project: str, network: NetworkHandle) -> aws_ec2.SecurityGroup:
        group = aws_ec2.SecurityGroup(
            self, "Group", vpc=network.vpc, description=f"The compile cache of {project}", allow_all_outbound=False
        )
        group.add_ingress_rule(aws_ec2.Peer.ipv4(network.cidr), aws_ec2.Port.tcp(2049), "mounts")
        return group

    def _make_file_system(
        self, project: str, network: NetworkHandle, store: StoreHandle, group: aws_ec2.ISecurityGroup
    ) -> aws_efs.FileSystem:
        return aws_efs.FileSystem(
            self,
            "Cache",
            vpc=network.vpc,
            vpc_subnets=aws_ec2.SubnetSelection(subnets=list(network.subnets.values())),
            security_group=group,
            file_system_name=f"{project}-cache",
            encrypted=True,
            kms_key=store.key,
            throughput_mode=aws_efs.ThroughputMode.ELASTIC,
            # Programs of unused models cost little in Infrequent Access; the first read moves them back.
            lifecycle_policy=aws_efs.LifecyclePolicy.AFTER_30_DAYS,
            out_of_infrequent_access_policy=aws_efs.OutOfInfrequentAccessPolicy.AFTER_1_ACCESS,
            enable_automatic_backups=False,
            removal_policy=RemovalPolicy.DESTROY,
            # Setting this to False makes CDK add a statement that allows writes to everyone; the policy below has none.
            allow_anonymous_access=True,
            file_system_policy=aws_iam.PolicyDocument(statements=_denials()),
        )

    def _make_access_point(self, file_system: aws_efs.FileSystem, version: str) -> aws_efs.AccessPoint:
        """Access point to the folder of one version: programs of one compiler crash under the driver of another."""
        return aws_efs.AccessPoint(
            self,
            f"Version-{version}",
            file_system=file_system,
            path=f"/{version}",
            create_acl=aws_efs.Acl(owner_uid=_OWNER, owner_gid=_OWNER, permissions="0750"),
            posix_user=aws_efs.PosixUser(uid=_OWNER, gid=_OWNER),
        )


def _denials() -> list[aws_iam.PolicyStatement]:
    """Deny statements only: access is granted by the policies of roles."""

    def deny(sid: str, actions: list[str], condition: dict[str, dict[str, str]]) -> aws_iam.PolicyStatement:
        return aws_iam.PolicyStatement(
            sid=sid,
            effect=aws_iam.Effect.DENY,
            principals=[aws_iam.AnyPrincipal()],
            actions=actions,
            conditions=condition,
        )

    client = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite", "elasticfilesystem:ClientRootAccess"]
    return [
        deny("DenyPlainText", ["*"], {"Bool": {"aws:SecureTransport": "false"}}),
        deny("DenyWithoutAccessPoint", client, {"Null": {"elasticfilesystem:AccessPointArn": "true"}}),
    ]
