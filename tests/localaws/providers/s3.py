"""Buckets and their policies."""

import json
from collections.abc import Mapping
from typing import Any, Final

from tests.localaws.formation.faults import Refused
from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags

# By property: the call that sets it, its argument, the call that reads it, and how the two name what is inside.
_PARTS: Final = {
    "BucketEncryption": ("put_bucket_encryption", "ServerSideEncryptionConfiguration", "get_bucket_encryption"),
    "VersioningConfiguration": ("put_bucket_versioning", "VersioningConfiguration", "get_bucket_versioning"),
    "PublicAccessBlockConfiguration": (
        "put_public_access_block",
        "PublicAccessBlockConfiguration",
        "get_public_access_block",
    ),
    "LifecycleConfiguration": (
        "put_bucket_lifecycle_configuration",
        "LifecycleConfiguration",
        "get_bucket_lifecycle_configuration",
    ),
    "LoggingConfiguration": ("put_bucket_logging", "BucketLoggingStatus", "get_bucket_logging"),
    "OwnershipControls": ("put_bucket_ownership_controls", "OwnershipControls", "get_bucket_ownership_controls"),
}


@provides
class Bucket(Provider):
    type = "AWS::S3::Bucket"
    properties = frozenset({*_PARTS, "AccessControl", "BucketName", "Tags"})
    fixed = frozenset({"BucketName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        name = wanted.get("BucketName") or at.name(63, lower=True)
        s3 = at.client("s3")
        place = {"LocationConstraint": at.region}
        s3.create_bucket(Bucket=name, **({} if at.region == "us-east-1" else {"CreateBucketConfiguration": place}))
        made = Made(
            name,
            {
                "Arn": f"arn:{at.partition}:s3:::{name}",
                "DomainName": f"{name}.s3.amazonaws.com",
                "RegionalDomainName": f"{name}.s3.{at.region}.amazonaws.com",
            },
        )
        at.begin(made)
        return self.update(made, {}, wanted, at)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        s3 = at.client("s3")
        for part, (call, argument, _) in _PARTS.items():
            if part in wanted and wanted[part] != before.get(part):
                getattr(s3, call)(**shaped(s3, call, {"Bucket": made.id, argument: _as_called(part, wanted[part])}))
        if "AccessControl" in wanted and wanted["AccessControl"] != before.get("AccessControl"):
            s3.put_bucket_acl(Bucket=made.id, ACL=_canned(wanted["AccessControl"]))
        if wanted.get("Tags") != before.get("Tags"):
            s3.put_bucket_tagging(Bucket=made.id, Tagging={"TagSet": tags(wanted)})
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("s3").delete_bucket(Bucket=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        s3 = at.client("s3")
        grants = {
            (grant["Grantee"].get("URI"), grant["Permission"]) for grant in s3.get_bucket_acl(Bucket=made.id)["Grants"]
        }
        found: dict[str, Any] = {
            "BucketName": made.id,
            "AccessControl": "Private" if grants == _OWNER_ONLY else "other",
        }
        for part, (_, argument, call) in _PARTS.items():
            try:
                told = getattr(s3, call)(Bucket=made.id)
            except s3.exceptions.ClientError:
                continue  # it has none
            found[part] = _as_declared(part, told.get(argument) or told)
        try:
            found["Tags"] = s3.get_bucket_tagging(Bucket=made.id)["TagSet"]
        except s3.exceptions.ClientError:
            return found
        return found


_OWNER_ONLY: Final = {(None, "FULL_CONTROL")}


def _canned(access: str) -> str:
    if access != "Private":
        raise Refused(f"the local AWS does not carry out the access control list {access}")
    return "private"


def _as_called(part: str, value: Mapping[str, Any]) -> dict[str, Any]:
    if part == "BucketEncryption":
        return {"Rules": [_renamed(rule, _DEFAULT_ENCRYPTION) for rule in value["ServerSideEncryptionConfiguration"]]}
    if part == "LoggingConfiguration":
        logging = {
            "TargetPrefix": "",
            **_renamed(value, {"DestinationBucketName": "TargetBucket", "LogFilePrefix": "TargetPrefix"}),
        }
        return {"LoggingEnabled": logging}
    if part == "LifecycleConfiguration":
        return {"Rules": [_lifecycle_rule(rule) for rule in value["Rules"]]}
    return dict(value)


def _as_declared(part: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The other way: what the service tells, in the template's names."""
    if part == "BucketEncryption":
        back = {new: old for old, new in _DEFAULT_ENCRYPTION.items()}
        return {"ServerSideEncryptionConfiguration": [_renamed(rule, back) for rule in told["Rules"]]}
    if part == "LoggingConfiguration":
        enabled = told.get("LoggingEnabled", {})
        return {"DestinationBucketName": enabled.get("TargetBucket"), "LogFilePrefix": enabled.get("TargetPrefix")}
    if part == "LifecycleConfiguration":
        return {"Rules": [_lifecycle_declared(rule) for rule in told["Rules"]]}
    return dict(told)


_DEFAULT_ENCRYPTION: Final = {"ServerSideEncryptionByDefault": "ApplyServerSideEncryptionByDefault"}


def _renamed(value: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): each for name, each in value.items()}


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """CloudFormation spreads over the rule what the service keeps together."""
    found = {"Filter": {"Prefix": rule.get("Prefix", "")}, "ID": rule["Id"], "Status": rule["Status"]}
    expiration = {
        new: rule[old]
        for old, new in (("ExpirationInDays", "Days"), ("ExpiredObjectDeleteMarker", "ExpiredObjectDeleteMarker"))
        if old in rule
    }
    if expiration:
        found["Expiration"] = expiration
    for part in ("NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload"):
        if part in rule:
            found[part] = dict(rule[part])
    known = {
        "AbortIncompleteMultipartUpload",
        "ExpirationInDays",
        "ExpiredObjectDeleteMarker",
        "Id",
        "NoncurrentVersionExpiration",
        "Prefix",
        "Status",
    }
    if unknown := sorted(set(rule) - known):
        raise Refused(f"lifecycle rule {rule['Id']}: the local AWS does not carry out {', '.join(unknown)}")
    return found


def _lifecycle_declared(rule: Mapping[str, Any]) -> dict[str, Any]:
    expiration = rule.get("Expiration", {})
    found: dict[str, Any] = {"Id": rule["ID"], "Status": rule["Status"], "Prefix": rule.get("Filter", {}).get("Prefix")}
    found["ExpirationInDays"] = expiration.get("Days")
    found["ExpiredObjectDeleteMarker"] = expiration.get("ExpiredObjectDeleteMarker")
    kept = {
        name: rule[name] for name in ("NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload") if name in rule
    }
    return {name: value for name, value in found.items() if value is not None} | kept


@provides
class BucketPolicy(Provider):
    type = "AWS::S3::BucketPolicy"
    properties = frozenset({"Bucket", "PolicyDocument"})
    fixed = frozenset({"Bucket"})

    def create(self, wanted: Properties, at: Site) -> Made:
        at.client("s3").put_bucket_policy(Bucket=wanted["Bucket"], Policy=json.dumps(wanted["PolicyDocument"]))
        return Made(wanted["Bucket"])

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        return self.create(wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("s3").delete_bucket_policy(Bucket=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        policy = at.client("s3").get_bucket_policy(Bucket=made.id)["Policy"]
        return {"Bucket": made.id, "PolicyDocument": json.loads(policy)}
