"""Where a training fleet on spot instances keeps what it must not lose: a bucket that outlives the fleet."""

from typing import Final

from aws_cdk import Duration, RemovalPolicy, Stack, aws_iam, aws_s3
from constructs import Construct

from nxpipe.stacks.handles import StoreHandle

_KEPT_AFTER_DELETION: Final = Duration.days(7)


def checkpoint_bucket(scope: Construct, fleet: str, store: StoreHandle) -> aws_s3.Bucket:
    return aws_s3.Bucket(
        scope,
        "Checkpoints",
        encryption=aws_s3.BucketEncryption.KMS,
        encryption_key=store.key,
        bucket_key_enabled=True,
        server_access_logs_bucket=store.logs,
        server_access_logs_prefix=f"checkpoints/{fleet}/",
        versioned=True,
        enforce_ssl=True,
        minimum_tls_version=1.2,
        block_public_access=aws_s3.BlockPublicAccess.BLOCK_ALL,
        object_ownership=aws_s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
        removal_policy=RemovalPolicy.RETAIN,
        lifecycle_rules=[
            aws_s3.LifecycleRule(
                id="replaced-checkpoints",
                noncurrent_version_expiration=_KEPT_AFTER_DELETION,
                expired_object_delete_marker=True,
                abort_incomplete_multipart_upload_after=_KEPT_AFTER_DELETION,
            )
        ],
    )


def grant_checkpoints(bucket: aws_s3.IBucket, store: StoreHandle, role: aws_iam.IRole) -> None:
    """Write, read, and drop old ones, whose last versions stay for a week."""
    through_s3 = {"StringEquals": {"kms:ViaService": f"s3.{Stack.of(role).region}.amazonaws.com"}}
    for statement in (
        aws_iam.PolicyStatement(
            actions=[
                "s3:AbortMultipartUpload",
                "s3:DeleteObject",
                "s3:GetObject",
                "s3:ListMultipartUploadParts",
                "s3:PutObject",
            ],
            resources=[bucket.arn_for_objects("*")],
        ),
        aws_iam.PolicyStatement(actions=["s3:ListBucket"], resources=[bucket.bucket_arn]),
        aws_iam.PolicyStatement(
            actions=["kms:Decrypt", "kms:GenerateDataKey"], resources=[store.key.key_arn], conditions=through_s3
        ),
    ):
        role.add_to_principal_policy(statement)
