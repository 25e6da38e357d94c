"""Buckets and bucket policies."""

import json
from collections.abc import Mapping
from typing import Any, Final

from tests.localaws.formation.faults import Refused
from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags

# By property: the call that sets it, its argument, and the call that reads it.
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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        name = desired.get("BucketName") or site.name(63, lower=True)
        s3 = site.client("s3")
        place = {"LocationConstraint": site.region}
        s3.create_bucket(Bucket=name, **({} if site.region == "us-east-1" else {"CreateBucketConfiguration": place}))
        resource = PhysicalResource(
            name,
            {
                "Arn": f"arn:{site.partition}:s3:::{name}",
                "DomainName": f"{name}.s3.amazonaws.com",
                "RegionalDomainName": f"{name}.s3.{site.region}.amazonaws.com",
            },
        )
        site.begin(resource)
        return self.update(resource, {}, desired, site)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        s3 = site.client("s3")
        for part, (call, argument, _) in _PARTS.items():
            if part in desired and desired[part] != before.get(part):
                getattr(s3, call)(
                    **shaped(s3, call, {"Bucket": resource.id, argument: _as_called(part, desired[part])})
                )
        if "AccessControl" in desired and desired["AccessControl"] != before.get("AccessControl"):
            s3.put_bucket_acl(Bucket=resource.id, ACL=_canned(desired["AccessControl"]))
        if desired.get("Tags") != before.get("Tags"):
            s3.put_bucket_tagging(Bucket=resource.id, Tagging={"TagSet": tags(desired)})
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("s3").delete_bucket(Bucket=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        s3 = site.client("s3")
        grants = {
            (grant["Grantee"].get("URI"), grant["Permission"])
            for grant in s3.get_bucket_acl(Bucket=resource.id)["Grants"]
        }
        actual: dict[str, Any] = {
            "BucketName": resource.id,
            "AccessControl": "Private" if grants == _OWNER_ONLY else "other",
        }
        for part, (_, argument, call) in _PARTS.items():
            try:
                result = getattr(s3, call)(Bucket=resource.id)
            except s3.exceptions.ClientError:
                continue  # the bucket does not have this setting
            actual[part] = _as_declared(part, result.get(argument) or result)
        try:
            actual["Tags"] = s3.get_bucket_tagging(Bucket=resource.id)["TagSet"]
        except s3.exceptions.ClientError:
            return actual
        return actual


_OWNER_ONLY: Final = {(None, "FULL_CONTROL")}


def _canned(access: str) -> str:
    if access != "Private":
        raise Refused(f"the local AWS does not support the access control list {access}")
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


def _as_declared(part: str, response: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: the service's response in the names of the template."""
    if part == "BucketEncryption":
        back = {new: old for old, new in _DEFAULT_ENCRYPTION.items()}
        return {"ServerSideEncryptionConfiguration": [_renamed(rule, back) for rule in response["Rules"]]}
    if part == "LoggingConfiguration":
        enabled = response.get("LoggingEnabled", {})
        return {"DestinationBucketName": enabled.get("TargetBucket"), "LogFilePrefix": enabled.get("TargetPrefix")}
    if part == "LifecycleConfiguration":
        return {"Rules": [_lifecycle_declared(rule) for rule in response["Rules"]]}
    return dict(response)


_DEFAULT_ENCRYPTION: Final = {"ServerSideEncryptionByDefault": "ApplyServerSideEncryptionByDefault"}


def _renamed(value: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): item for name, item in value.items()}


def _lifecycle_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule in the service's form; CloudFormation's form is flat."""
    document = {"Filter": {"Prefix": rule.get("Prefix", "")}, "ID": rule["Id"], "Status": rule["Status"]}
    expiration = {
        new: rule[old]
        for old, new in (("ExpirationInDays", "Days"), ("ExpiredObjectDeleteMarker", "ExpiredObjectDeleteMarker"))
        if old in rule
    }
    if expiration:
        document["Expiration"] = expiration
    for part in ("NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload"):
        if part in rule:
            document[part] = dict(rule[part])
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
        raise Refused(f"lifecycle rule {rule['Id']}: the local AWS does not support {', '.join(unknown)}")
    return document


def _lifecycle_declared(rule: Mapping[str, Any]) -> dict[str, Any]:
    expiration = rule.get("Expiration", {})
    document: dict[str, Any] = {
        "Id": rule["ID"],
        "Status": rule["Status"],
        "Prefix": rule.get("Filter", {}).get("Prefix"),
    }
    document["ExpirationInDays"] = expiration.get("Days")
    document["ExpiredObjectDeleteMarker"] = expiration.get("ExpiredObjectDeleteMarker")
    nested = {
        name: rule[name] for name in ("NoncurrentVersionExpiration", "AbortIncompleteMultipartUpload") if name in rule
    }
    return {name: value for name, value in document.items() if value is not None} | nested


@provides
class BucketPolicy(Provider):
    type = "AWS::S3::BucketPolicy"
    properties = frozenset({"Bucket", "PolicyDocument"})
    fixed = frozenset({"Bucket"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        site.client("s3").put_bucket_policy(Bucket=desired["Bucket"], Policy=json.dumps(desired["PolicyDocument"]))
        return PhysicalResource(desired["Bucket"])

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        return self.create(desired, site)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("s3").delete_bucket_policy(Bucket=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        policy = site.client("s3").get_bucket_policy(Bucket=resource.id)["Policy"]
        return {"Bucket": resource.id, "PolicyDocument": json.loads(policy)}
