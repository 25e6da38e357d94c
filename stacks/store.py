"""Storage stack: the artifact bucket, its KMS key, its access logs, and the ECR repository of server images."""

from typing import Any, Final

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack, aws_ecr, aws_iam, aws_kms, aws_s3
from constructs import Construct

from nxpipe.stacks.handles import StoreHandle
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
