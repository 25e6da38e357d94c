"""The stateful stack: one bucket that keeps artifacts, and the key that encrypts it."""

from typing import Any

from aws_cdk import CfnOutput, Duration, RemovalPolicy, Stack, Tags, aws_kms, aws_s3
from constructs import Construct

# Long enough to resume a large upload after a weekend; unfinished parts cost money and no listing shows them.
UNFINISHED_UPLOADS = Duration.days(7)

# Artifacts are written once, and a rollback reads current versions only, which never expire. A noncurrent version is
# what a deletion or a moved channel head left behind: this is how long such a mistake can be undone.
UNDO_WINDOW = Duration.days(90)


class StorageStack(Stack):
    """Where every build publishes and every fleet reads; other stacks are granted access through the two handles."""

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
        self.key = self._make_key(project, removal_policy)
        self.bucket = self._make_bucket(self.key, removal_policy)
        Tags.of(self).add("nxpipe:project", project)
        CfnOutput(self, "BucketName", value=self.bucket.bucket_name, description="Artifacts live in this bucket")
        CfnOutput(self, "KeyArn", value=self.key.key_arn, description="Readers and writers need this KMS key")

    def _make_key(self, project: str, removal_policy: RemovalPolicy) -> aws_kms.Key:
        return aws_kms.Key(
            self,
            "Key",
            description=f"Encrypts the artifacts of {project}",
            enable_key_rotation=True,
            removal_policy=removal_policy,  # a deleted key would make kept artifacts unreadable
        )

    def _make_bucket(self, key: aws_kms.Key, removal_policy: RemovalPolicy) -> aws_s3.Bucket:
        return aws_s3.Bucket(
            self,
            "Artifacts",
            encryption=aws_s3.BucketEncryption.KMS,
            encryption_key=key,
            bucket_key_enabled=True,  # one KMS call per bucket and hour instead of one per object
            versioned=True,
            enforce_ssl=True,
            minimum_tls_version=1.2,
            block_public_access=aws_s3.BlockPublicAccess.BLOCK_ALL,
            object_ownership=aws_s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
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
        )
