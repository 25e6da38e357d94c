"""Logging of buckets. Moto wants the policy that lets S3 deliver to be there first; S3 does not look at it, and a
policy that names the logged bucket, as it should, could not be.
"""

from typing import Any

from moto.s3.models import FakeBucket


def mend() -> None:
    FakeBucket._log_permissions_enabled_policy = staticmethod(_not_looked_at)


def _not_looked_at(target_bucket: Any, target_prefix: str | None) -> bool:
    return True
