"""What a publisher may do in the store: add to it and read it, but remove nothing and rewrite no record.

The folders are those of docs/store-format.md. Where an object is created once, S3 itself holds a publisher to that: a
write there without `If-None-Match` is not allowed, so that a job that was taken over damages nothing of what is served.
To mend a damaged blob takes somebody who may replace it. Channels are missing: what runs somewhere is another's
decision.
"""

from collections.abc import Sequence
from typing import Final

from aws_cdk import Stack, aws_iam

from nxpipe.stacks.handles import StoreHandle

CREATED_ONCE: Final = ("ac/", "cas/", "evidence/", "parts/", "sig/")
YOUNG_AGAIN: Final = "cas/"  # what is copied onto itself, so that no collection takes it (section 7)
EVIDENCE: Final = "evidence/"  # the same of what is said again about an artifact that was given up (section 19)
IN_PARTS: Final = "cas/"  # what may be larger than one request
SIGNED_BY: Final = "ECDSA_SHA_256"  # the one algorithm of docs/store-format.md that KMS has
REPLACED: Final = ("failures/", "index/", "leases/", "neuron-artifacts/", "reports/", "runs/")


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
        # Parts are sent without a condition; what puts them together has one.
        aws_iam.PolicyStatement(
            sid="SendParts",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{IN_PARTS}*")],
            conditions={"Bool": {"s3:ObjectCreationOperation": "false"}},
        ),
        keep_young(store, prefix),
        keep_young(store, prefix, EVIDENCE, sid="KeepEvidenceYoung"),
        aws_iam.PolicyStatement(
            sid="AddObjects",
            actions=["s3:PutObject"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in REPLACED],
        ),
        aws_iam.PolicyStatement(
            sid="BreakOff",
            actions=["s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
            resources=[bucket.arn_for_objects(f"{prefix}{folder}*") for folder in (IN_PARTS, *REPLACED)],
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


def keep_young(
    store: StoreHandle, prefix: str, folder: str = YOUNG_AGAIN, *, sid: str = "KeepYoung"
) -> aws_iam.PolicyStatement:
    """Whoever names a blob again copies it onto itself. IAM cannot say "itself", but that the bytes come from the
    same folder of this store and from nowhere else.
    """
    bucket = store.bucket
    return aws_iam.PolicyStatement(
        sid=sid,
        actions=["s3:PutObject"],
        resources=[bucket.arn_for_objects(f"{prefix}{folder}*")],
        conditions={"StringLike": {"s3:x-amz-copy-source": f"{bucket.bucket_name}/{prefix}{folder}*"}},
    )


def signing_with(key: str) -> list[aws_iam.PolicyStatement]:
    """With one key, by its ARN."""
    return [
        aws_iam.PolicyStatement(
            sid="Sign",
            actions=["kms:Sign"],
            resources=[key],
            conditions={"StringEquals": {"kms:SigningAlgorithm": SIGNED_BY}},
        )
    ]


def knowing(keys: Sequence[str]) -> list[aws_iam.PolicyStatement]:
    """To look up the public halves of keys, without which nobody knows whose signature it is."""
    actions = ["kms:GetPublicKey"]
    return [aws_iam.PolicyStatement(sid="TellWhoSigned", actions=actions, resources=list(keys))] if keys else []


def kms_key(said: str | None) -> str | None:
    """The ARN of a key that signs, if it is one of KMS."""
    kind, _, arn = (said or "").partition(":")
    return arn if kind == "kms" else None
