"""Rules about data: buckets are private, and neither S3 nor EFS speaks plain text."""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.reading.template import Properties, Resource, Templates, is_true, settings, tables
from nxpipe.stacks.rules.finding import Facts, Finding

PRIVATE = "NXP-DATA-1"

_WAYS: Final = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")


def private(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for bucket in all_.of("AWS::S3::Bucket"):
        blocked = settings(bucket.properties, "PublicAccessBlockConfiguration")
        ways = [way for way in _WAYS if not is_true(blocked.get(way))]
        if ways:
            what = f"the bucket can become public: {', '.join(ways)} {'is' if len(ways) == 1 else 'are'} not set"
            yield Finding(PRIVATE, bucket, "PublicAccessBlockConfiguration", what, "set all four to true")
        if not any(_refuses_plain_text(policy, "PolicyDocument") for policy in _policies(all_, bucket)):
            what = "the bucket answers requests in plain text"
            yield Finding(PRIVATE, bucket, "", what, "deny all actions when aws:SecureTransport is false")
    for system in all_.of("AWS::EFS::FileSystem"):
        if not is_true(system.properties.get("Encrypted")):
            what = "the file system is not encrypted"
            yield Finding(PRIVATE, system, "Encrypted", what, "set it to true; that makes a new file system")
        if not _refuses_plain_text(system, "FileSystemPolicy"):
            what = "the file system is mounted in plain text too"
            yield Finding(
                PRIVATE, system, "FileSystemPolicy", what, "deny what comes when aws:SecureTransport is false"
            )


def _policies(all_: Templates, bucket: Resource) -> Iterator[Resource]:
    for policy in all_.of("AWS::S3::BucketPolicy"):
        found = all_.follow(policy.properties.get("Bucket"), policy)
        if found is not None and found.key == bucket.key:
            yield policy


def _refuses_plain_text(holder: Resource, key: str) -> bool:
    return any(_denies(statement) for statement in tables(settings(holder.properties, key), "Statement"))


def _denies(statement: Properties) -> bool:
    condition = settings(settings(statement, "Condition"), "Bool").get("aws:SecureTransport")
    everyone = statement.get("Principal") in ("*", {"AWS": "*"})
    return statement.get("Effect") == "Deny" and everyone and str(condition).lower() == "false"
