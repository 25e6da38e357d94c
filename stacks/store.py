"""Stack of the artifact store: the bucket, its key, its access logs, and the registry of server images."""

from typing import Any, Final

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack, aws_ecr, aws_iam, aws_kms, aws_s3
from constructs import Construct

from nxpipe.stacks.handles import StoreHandle
from nxpipe.stacks.project import tag_project

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
