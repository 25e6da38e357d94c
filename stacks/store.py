"""Compile cache: an EFS file system beside the fleets, so that a new instance need not read the bucket.

The bucket holds everything that is in the cache, so this stack may be destroyed and created again at any time.
"""

from typing import Any, Final

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack, aws_ec2, aws_ecr, aws_efs, aws_iam, aws_kms, aws_s3
from constructs import Construct

from nxpipe.stacks.handles import CacheHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.project import tag_project

# Whoever mounts is this user, so that what one instance wrote the next one may replace.
_OWNER: Final = "7200"


class CacheStack(Stack):
    """Mounted with TLS, by a role, through the access point of one version of the SDK; in no other way."""

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
        CfnOutput(self, "FileSystemId", value=file_system.file_system_id, description="Keeps compiled programs")

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
            # Programs of models that nobody runs any more are cheap to keep, and dear only once when they come back.
            lifecycle_policy=aws_efs.LifecyclePolicy.AFTER_30_DAYS,
            out_of_infrequent_access_policy=aws_efs.OutOfInfrequentAccessPolicy.AFTER_1_ACCESS,
            enable_automatic_backups=False,
            removal_policy=RemovalPolicy.DESTROY,
            # What CDK calls refusing the anonymous is a policy that allows everyone to write: ours allows nobody.
            allow_anonymous_access=True,
            file_system_policy=aws_iam.PolicyDocument(statements=_refused()),
        )

    def _make_access_point(self, file_system: aws_efs.FileSystem, version: str) -> aws_efs.AccessPoint:
        """Programs of one compiler crash under another's driver: each version is root of a folder of its own."""
        return aws_efs.AccessPoint(
            self,
            f"Version-{version}",
            file_system=file_system,
            path=f"/{version}",
            create_acl=aws_efs.Acl(owner_uid=_OWNER, owner_gid=_OWNER, permissions="0750"),
            posix_user=aws_efs.PosixUser(uid=_OWNER, gid=_OWNER),
        )


def _refused() -> list[aws_iam.PolicyStatement]:
    """A policy without an Allow: what a role's own policy does not grant is refused, and so is this for everyone."""

    def deny(name: str, actions: list[str], condition: dict[str, dict[str, str]]) -> aws_iam.PolicyStatement:
        return aws_iam.PolicyStatement(
            sid=name,
            effect=aws_iam.Effect.DENY,
            principals=[aws_iam.AnyPrincipal()],
            actions=actions,
            conditions=condition,
        )

    client = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite", "elasticfilesystem:ClientRootAccess"]
    return [
        deny("PlainText", ["*"], {"Bool": {"aws:SecureTransport": "false"}}),
        deny("WithoutAccessPoint", client, {"Null": {"elasticfilesystem:AccessPointArn": "true"}}),
    ]


# Long enough to resume a large upload after a weekend; unfinished parts cost money and no listing shows them.
UNFINISHED_UPLOADS = Duration.days(7)

# Artifacts are written once, and a rollback reads current versions only, which never expire. A noncurrent version is
# what a deletion or a moved channel head left behind: this is how long such a mistake can be undone.
UNDO_WINDOW = Duration.days(90)

# Who read what is asked about after an incident, and incidents are noticed late.
ACCESS_LOGS_KEPT = Duration.days(400)

_PRIVATE: Final[dict[str, Any]] = {
    "enforce_ssl": True,
    "minimum_tls_version": 1.2,
    "versioned": True,
    "block_public_access": aws_s3.BlockPublicAccess.BLOCK_ALL,
    "object_ownership": aws_s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
}


class StoreStack(Stack):
    """Where every build publishes and every fleet reads; `stacks.grants` lets other stacks in."""

    handle: StoreHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        removal_policy: RemovalPolicy = RemovalPolicy.RETAIN,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, id_, description=f"Artifact store of {project}", **kwargs)
        key = self._make_key(project, removal_policy)
        logs = self._make_log_bucket(removal_policy)
        bucket = self._make_bucket(key, logs, removal_policy)
        repository = self._make_repository(key, removal_policy)
        self.handle = StoreHandle(bucket=bucket, key=key, logs=logs, repository=repository)
        tag_project(self, project)
        CfnOutput(self, "BucketName", value=bucket.bucket_name, description="Artifacts live in this bucket")
        CfnOutput(self, "KeyArn", value=key.key_arn, description="Readers and writers need this KMS key")
        CfnOutput(self, "RepositoryUri", value=repository.repository_uri, description="Images are pushed here")

    def _make_key(self, project: str, removal_policy: RemovalPolicy) -> aws_kms.Key:
        return aws_kms.Key(
            self,
            "Key",
            description=f"Encrypts the artifacts of {project}",
            enable_key_rotation=True,
            removal_policy=removal_policy,  # a deleted key would make kept artifacts unreadable
        )

    def _make_log_bucket(self, removal_policy: RemovalPolicy) -> aws_s3.Bucket:
        """S3 delivers access logs only where its own key encrypts them."""
        logs = aws_s3.Bucket(
            self,
            "Logs",
            encryption=aws_s3.BucketEncryption.S3_MANAGED,
            removal_policy=removal_policy,
            lifecycle_rules=[
                aws_s3.LifecycleRule(
                    id="kept-for-incidents",
                    expiration=ACCESS_LOGS_KEPT,
                    noncurrent_version_expiration=Duration.days(1),
                    abort_incomplete_multipart_upload_after=UNFINISHED_UPLOADS,
                )
            ],
            **_PRIVATE,
        )
        logs.add_to_resource_policy(self._only_our_logs(logs))
        return logs

    def _only_our_logs(self, logs: aws_s3.Bucket) -> aws_iam.PolicyStatement:
        """What CDK adds for buckets of other stacks lets in the logs of anybody's bucket."""
        return aws_iam.PolicyStatement(
            sid="OnlyOurLogs",
            effect=aws_iam.Effect.DENY,
            actions=["s3:PutObject"],
            principals=[aws_iam.ServicePrincipal("logging.s3.amazonaws.com")],
            resources=[logs.arn_for_objects("*")],
            conditions={"StringNotEquals": {"aws:SourceAccount": self.account}},
        )

    def _make_bucket(self, key: aws_kms.Key, logs: aws_s3.Bucket, removal_policy: RemovalPolicy) -> aws_s3.Bucket:
        return aws_s3.Bucket(
            self,
            "Artifacts",
            encryption=aws_s3.BucketEncryption.KMS,
            encryption_key=key,
            bucket_key_enabled=True,  # one KMS call per bucket and hour instead of one per object
            server_access_logs_bucket=logs,
            server_access_logs_prefix="artifacts/",
            removal_policy=removal_policy,
            lifecycle_rules=[
                aws_s3.LifecycleRule(
                    id="unfinished-uploads", abort_incomplete_multipart_upload_after=UNFINISHED_UPLOADS
                ),
                aws_s3.LifecycleRule(
                    id="undo-window",
                    noncurrent_version_expiration=UNDO_WINDOW,
                    expired_object_delete_marker=True,
                ),
            ],
            **_PRIVATE,
        )

    def _make_repository(self, key: aws_kms.Key, removal_policy: RemovalPolicy) -> aws_ecr.Repository:
        """Images are named by their digests, so none expires: one without a tag may be what a fleet runs."""
        return aws_ecr.Repository(
            self,
            "Images",
            encryption=aws_ecr.RepositoryEncryption.KMS,
            encryption_key=key,
            image_scan_on_push=True,
            image_tag_mutability=aws_ecr.TagMutability.IMMUTABLE,
            removal_policy=removal_policy,
        )
