"""What a publisher may do in the store: add to it and read it, but remove nothing and rewrite no record.

The folders are those of docs/store-format.md. Where a record is created once, S3 itself holds a publisher to that: a
write there without `If-None-Match` is not allowed. Channels are missing: what runs somewhere is another's decision.
"""

from typing import Final

from aws_cdk import Stack, aws_iam

from pipeline.config import Signing
from stacks.handles import StoreHandle

CREATED_ONCE: Final = ("ac/", "evidence/", "parts/")
SIGNED_BY: Final = "ECDSA_SHA_256"  # the one algorithm of docs/store-format.md that KMS has
REPLACED: Final = ("cas/", "failures/", "index/", "leases/", "neuron-artifacts/", "reports/", "runs/", "sig/")


def publishing(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements for a store at `prefix` of the bucket: "" or "models/", say."""
    bucket = store.bucket
    s3 = f"s3.{Stack.of(bucket).region}.amazonaws.com"
    return [
        aws_iam.PolicyStatement(
            sid="AddRecords",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in CREATED_ONCE],
            conditions={"Null": {"s3:if-none-match": "false"}},
        ),
        aws_iam.PolicyStatement(
            sid="AddObjects",
            actions=["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts", "s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in REPLACED],
        ),
        aws_iam.PolicyStatement(sid="Read", actions=["s3:GetObject"], resources=[bucket.arn_for_objects(f"{prefix}*")]),
        # Without the permission to list, S3 answers "denied" for an object that is absent; so no condition on prefixes.
        aws_iam.PolicyStatement(
            sid="TellWhatIsAbsent",
            actions=["s3:ListBucket", "s3:ListBucketMultipartUploads"],
            resources=[bucket.bucket_arn],
        ),
        # To decrypt is needed for writing too: S3 does so when it puts the parts of an upload together.
        aws_iam.PolicyStatement(
            sid="Encrypt",
            actions=["kms:Decrypt", "kms:GenerateDataKey"],
            resources=[store.key.key_arn],
            conditions={"StringEquals": {"kms:ViaService": s3}},
        ),
    ]


def signing(key: str) -> list[aws_iam.PolicyStatement]:
    """With one key, by its ARN: sign, and look up its public half, without which nobody knows whose signature it is."""
    return [
        aws_iam.PolicyStatement(
            sid="Sign",
            actions=["kms:Sign"],
            resources=[key],
            conditions={"StringEquals": {"kms:SigningAlgorithm": SIGNED_BY}},
        ),
        aws_iam.PolicyStatement(sid="TellWhoSigned", actions=["kms:GetPublicKey"], resources=[key]),
    ]


def kms_key(said: Signing) -> str | None:
    """The ARN of the key that signs, if it is one of KMS."""
    kind, _, arn = (said.key or "").partition(":")
    return arn if kind == "kms" else None
