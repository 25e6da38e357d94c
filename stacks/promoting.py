"""What may be done in the store beside publishing: to read it, and to say what one channel serves.

Whoever promotes keeps what he looks at from being collected meanwhile, by pins that he removes again; no other.
"""

from typing import Final

from aws_cdk import Stack, aws_iam

from nxpipe.stacks.handles import StoreHandle
from nxpipe.stacks.publishing import keep_young

_PINS: Final = "pins/held-"


def reading(store: StoreHandle, prefix: str) -> list[aws_iam.PolicyStatement]:
    """Statements for a store at `prefix` of the bucket: "" or "models/", say."""
    bucket = store.bucket
    return [
        aws_iam.PolicyStatement(sid="Read", actions=["s3:GetObject"], resources=[bucket.arn_for_objects(f"{prefix}*")]),
        # Without the permission to list, S3 answers "denied" for an object that is absent; so no condition on prefixes.
        aws_iam.PolicyStatement(sid="TellWhatIsAbsent", actions=["s3:ListBucket"], resources=[bucket.bucket_arn]),
        _key(store, "Decrypt", "kms:Decrypt"),
    ]


def promoting(store: StoreHandle, prefix: str, channel: str) -> list[aws_iam.PolicyStatement]:
    """A generation is created, so that of two at the same time one is told that it came second; none is replaced."""
    objects, log = store.bucket.arn_for_objects, f"{prefix}channels/{channel}/"
    pins = objects(f"{prefix}{_PINS}*")
    return [
        aws_iam.PolicyStatement(
            sid="AddGenerations",
            actions=["s3:PutObject"],
            resources=[objects(f"{log}log/*"), pins],
            conditions={"Null": {"s3:if-none-match": "false"}},
        ),
        aws_iam.PolicyStatement(sid="MoveHead", actions=["s3:PutObject"], resources=[objects(f"{log}head")]),
        keep_young(store, prefix),  # of what was published long ago
        aws_iam.PolicyStatement(sid="LetGo", actions=["s3:DeleteObject"], resources=[pins]),
        _key(store, "Encrypt", "kms:GenerateDataKey"),
    ]


def _key(store: StoreHandle, sid: str, action: str) -> aws_iam.PolicyStatement:
    s3 = f"s3.{Stack.of(store.bucket).region}.amazonaws.com"
    conditions = {"StringEquals": {"kms:ViaService": s3}}
    return aws_iam.PolicyStatement(sid=sid, actions=[action], resources=[store.key.key_arn], conditions=conditions)
