"""Logging of buckets. Moto requires that the policy for log delivery already exists. S3 does not check it; a policy
that names the logged bucket could not exist before that bucket."""

from typing import Any

from moto.s3.models import FakeBucket


def apply() -> None:
    FakeBucket._log_permissions_enabled_policy = staticmethod(_not_looked_at)


def _not_looked_at(target_bucket: Any, target_prefix: str | None) -> bool:
    return True
