"""Storage stacks: of artifacts (the bucket, its KMS key and access logs, the ECR repository of server images), and of
compile caches (an EFS file system with one access point for each version of the Neuron SDK).

The cache holds nothing that could not be compiled again, so its stack may be destroyed and created at any time.
"""

from typing import Any, Final

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack, aws_ec2, aws_ecr, aws_efs, aws_iam, aws_kms, aws_s3
from constructs import Construct

from nxpipe.stacks.handles import CacheHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.project import tag_project
from nxpipe.stacks.references import export

# Long enough to resume a large upload after a weekend. Parts of unfinished uploads cost money, but are not listed.
UNFINISHED_UPLOADS = Duration.days(7)

# Artifacts are written once, and a rollback reads current versions only, which never expire. Noncurrent versions result
# from deletions and moved channel heads: such a mistake can be undone for this long.
UNDO_WINDOW = Duration.days(90)

# Access logs are evidence after an incident, which may be noticed months later.
ACCESS_LOGS_KEPT = Duration.days(400)

_PRIVATE: Final[dict[str, Any]] = {
    "enforce_ssl": True,
    "minimum_tls_version": 1.2,
    "versioned": True,
    "block_public_access": aws_s3.BlockPublicAccess.BLOCK_ALL,
    "object_ownership": aws_s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
}


class StoreStack(Stack):
    """Store that builds publish to and fleets read from; `stacks.iam` has the policies of other stacks."""

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
        export(self, bucket.bucket_name, bucket.bucket_arn, key.key_arn, logs.bucket_name)
        tag_project(self, project)
        CfnOutput(self, "BucketName", value=bucket.bucket_name, description="Bucket of the artifact store")
        CfnOutput(self, "KeyArn", value=key.key_arn, description="KMS key of the artifact store")
        CfnOutput(self, "RepositoryUri", value=repository.repository_uri, description="Repository of server images")

    def _make_key(self, project: str, removal_policy: RemovalPolicy) -> aws_kms.Key:
        return aws_kms.Key(
            self,
            "Key",
            description=f"Encrypts the artifacts of {project}",
            enable_key_rotation=True,
            removal_policy=removal_policy,  # without the key, retained artifacts are unreadable
        )

    def _make_log_bucket(self, removal_policy: RemovalPolicy) -> aws_s3.Bucket:
        """Bucket for access logs. S3 delivers them only to buckets with SSE-S3 encryption."""
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
        logs.add_to_resource_policy(self._only_own_account_logs(logs))
        return logs

    def _only_own_account_logs(self, logs: aws_s3.Bucket) -> aws_iam.PolicyStatement:
        """Deny logs of other accounts: the statement that CDK adds for other stacks' buckets does not exclude them."""
        return aws_iam.PolicyStatement(
            sid="OnlyOwnAccountLogs",
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
        """Image repository without expiry: fleets name images by digest, so an untagged image may be in use."""
        return aws_ecr.Repository(
            self,
            "Images",
            encryption=aws_ecr.RepositoryEncryption.KMS,
            encryption_key=key,
            image_scan_on_push=True,
            image_tag_mutability=aws_ecr.TagMutability.IMMUTABLE,
            removal_policy=removal_policy,
        )


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
