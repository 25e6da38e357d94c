"""The table [store]: URL, replicas, read-through cache and encryption of the artifact store."""

from typing import Annotated

from pydantic import Field

from nxpipe.pipeline.config.kinds import DISTINCT, MAYBE_EMPTY, Folder, KmsKey, Size, StoreUrl
from nxpipe.pipeline.config.schema import Absent, Table


class Store(Table):
    """The store of artifacts, and its replicas."""

    url: StoreUrl = Field(
        default="file://.nxpipe/store",
        description="The URL of the store. A relative folder starts at the folder of this file.",
        examples=["s3://search-artifacts/models"],
    )
    endpoints: Annotated[tuple[StoreUrl, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(),
        description="Replicas to read from, in this order, when `url` is unavailable.",
        examples=[["s3://search-artifacts-us-west-2/models"]],
    )
    cache: Folder = Field(
        default="~/.cache/nxpipe",
        description="The folder of the read-through cache for a store in S3. Its objects are verified.",
        examples=["/mnt/efs/nxpipe"],
    )
    cache_limit: Size = Field(
        default=20 << 30,
        description="The size limit of `cache`; the least recently used objects are evicted.",
        examples=["20GiB"],
    )
    kms_key: Annotated[KmsKey | None, Absent("the bucket's default encryption")] = Field(
        default=None,
        description="The KMS key that encrypts objects in the bucket of `url`.",
        examples=["arn:aws:kms:us-east-2:123456789012:key/0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"],
    )
