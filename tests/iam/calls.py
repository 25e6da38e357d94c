"""Requests on the wire as what IAM authorizes: action, resource and condition keys."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from nxpipe.stacks.names import PROJECT_TAG
from tests.iam.evaluator import Context, Request
from tests.iam.templates import ACCOUNT, REGION

_NO_CONTEXT: Final[Context] = {}
_HERE: Final = f"{REGION}:{ACCOUNT}"
FREE: Final = {"sts:GetCallerIdentity"}  # needs no permission


@dataclass(frozen=True, order=True)
class Call:
    """One authorization. The context is sorted; a tuple is a multivalued key."""

    action: str
    resource: str
    context: tuple[tuple[str, str | tuple[str, ...]], ...] = field(default=())

    @classmethod
    def of(cls, action: str, resource: str, context: Context = _NO_CONTEXT) -> "Call":
        return cls(action, resource, tuple(sorted(context.items())))

    @property
    def request(self) -> Request:
        return Request(self.action, self.resource, dict(self.context))

    def without(self, key: str) -> "Call":
        return Call(self.action, self.resource, tuple(entry for entry in self.context if entry[0] != key))

    def having(self, key: str, value: str | tuple[str, ...]) -> "Call":
        return Call.of(self.action, self.resource, {**dict(self.context), key: value})


@dataclass(frozen=True)
class Wire:
    """A signed request."""

    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def service(self) -> str:
        """The service in the scope of the signature."""
        return self.headers["authorization"].partition("Credential=")[2].partition(",")[0].split("/")[3]

    @property
    def access_key(self) -> str:
        return self.headers["authorization"].partition("Credential=")[2].partition("/")[0]

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.url).query, keep_blank_values=True))


class UnknownCall(Exception):
    """A request that this module cannot name; it must learn it, so that none goes unchecked."""


def authorizations(wire: Wire, keys: Mapping[str, str]) -> Iterator[Call]:
    """What a request needs. `keys` has the ARN of each bucket's KMS key."""
    if wire.service == "s3":
        yield from _of_s3(wire, keys)
    elif wire.service == "batch":
        yield from _of_batch(wire)
    elif "x-amz-target" in wire.headers:
        yield from _of_json(wire)
    elif "/service/" in wire.url and "/operation/" in wire.url:  # Smithy RPC v2
        yield Call.of(f"{_iam_service(wire.service)}:{wire.url.rpartition('/')[2]}", "*")
    else:
        yield from _of_query(wire)


def _iam_service(signing: str) -> str:
    return {"monitoring": "cloudwatch"}.get(signing, signing)


# S3

_BUCKET_CALLS: Final = {
    "uploads": "s3:ListBucketMultipartUploads",
    "versions": "s3:ListBucketVersions",
    "versioning": "s3:GetBucketVersioning",
    "location": "s3:GetBucketLocation",
    "lifecycle": "s3:GetLifecycleConfiguration",
    "encryption": "s3:GetEncryptionConfiguration",
}


def _of_s3(wire: Wire, keys: Mapping[str, str]) -> Iterator[Call]:
    bucket, key = _place(wire.url)
    query, transport = wire.query, {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"}
    if not key:
        action = next((_BUCKET_CALLS[name] for name in query if name in _BUCKET_CALLS), "s3:ListBucket")
        if wire.method not in ("GET", "HEAD"):
            raise UnknownCall(f"{wire.method} {wire.url}")
        prefix = {"s3:prefix": query["prefix"]} if "prefix" in query else {}
        yield Call.of(action, f"arn:aws:s3:::{bucket}", {**transport, **prefix})
        return
    action, extra, uses = _object_call(wire)
    yield Call.of(action, f"arn:aws:s3:::{bucket}/{key}", {**transport, **extra})
    if "x-amz-copy-source" in wire.headers:
        source = unquote(wire.headers["x-amz-copy-source"]).lstrip("/").partition("?")[0]
        yield Call.of("s3:GetObject", f"arn:aws:s3:::{source}", transport)
    if bucket in keys:
        for operation in uses:
            yield Call.of(f"kms:{operation}", keys[bucket], {"kms:ViaService": f"s3.{REGION}.amazonaws.com"})


def _place(url: str) -> tuple[str, str]:
    """Bucket and key, of an address of either style."""
    parts = urlsplit(url)
    host, path = parts.hostname or "", unquote(parts.path).lstrip("/")
    if host.startswith("s3.") or not host.endswith("amazonaws.com"):
        bucket, _, key = path.partition("/")
        return bucket, key
    return host.partition(".s3.")[0], path


def _object_call(wire: Wire) -> tuple[str, dict[str, str], Sequence[str]]:
    """Action, condition keys, and the operations on the KMS key that S3 performs for the caller."""
    query, method = wire.query, wire.method
    upload = "uploadId" in query or "uploads" in query
    if method in ("GET", "HEAD"):
        if upload:
            return "s3:ListMultipartUploadParts", {}, ()
        return ("s3:GetObjectVersion" if "versionId" in query else "s3:GetObject"), {}, ("Decrypt",)
    if method == "DELETE":
        if upload:
            return "s3:AbortMultipartUpload", {}, ()
        return ("s3:DeleteObjectVersion" if "versionId" in query else "s3:DeleteObject"), {}, ()
    if method not in ("PUT", "POST") or (set(query) - {"uploadId", "uploads", "partNumber", "x-id"}):
        raise UnknownCall(f"{method} {wire.url}")
    # An object comes into being by a PUT, a copy or the completion of an upload.
    creates = not upload or (method == "POST" and "uploadId" in query)
    keys = {"s3:ObjectCreationOperation": "true" if creates else "false"}
    copies = "x-amz-copy-source" in wire.headers
    if copies:
        keys["s3:x-amz-copy-source"] = unquote(wire.headers["x-amz-copy-source"]).lstrip("/")
    if "if-none-match" in wire.headers:
        keys["s3:if-none-match"] = wire.headers["if-none-match"]
    return "s3:PutObject", keys, ("Decrypt", "GenerateDataKey") if upload or copies else ("GenerateDataKey",)


# Batch

_BATCH_CALLS: Final = {
    "describejobdefinitions": "DescribeJobDefinitions",
    "describejobqueues": "DescribeJobQueues",
    "describejobs": "DescribeJobs",
    "listjobs": "ListJobs",
}


def _of_batch(wire: Wire) -> Iterator[Call]:
    operation, body = wire.url.rpartition("/")[2], json.loads(wire.body or b"{}")
    if operation in _BATCH_CALLS:
        yield Call.of(f"batch:{_BATCH_CALLS[operation]}", "*")
    elif operation == "submitjob":
        for resource in (body["jobQueue"], body["jobDefinition"]):
            yield Call.of("batch:SubmitJob", resource)
            if tags := body.get("tags"):
                context = {f"aws:RequestTag/{name}": value for name, value in tags.items()}
                yield Call.of("batch:TagResource", resource, context)
    elif operation == "terminatejob":
        # The project's own jobs have its tag, which they get at submission.
        job, tag = f"arn:aws:batch:{_HERE}:job/{body['jobId']}", f"aws:ResourceTag/{PROJECT_TAG}"
        yield Call.of("batch:TerminateJob", job, {tag: "demo"})
    else:
        raise UnknownCall(wire.url)


# JSON protocols

_SERVICES: Final = {
    "AWSStepFunctions": "states",
    "DynamoDB_20120810": "dynamodb",
    "GraniteServiceVersion20100801": "cloudwatch",
    "Logs_20140328": "logs",
    "TrentService": "kms",
}


def _of_json(wire: Wire) -> Iterator[Call]:
    target, _, operation = wire.headers["x-amz-target"].rpartition(".")
    body = json.loads(wire.body or b"{}")
    service = _SERVICES.get(target)
    if service is None:
        raise UnknownCall(wire.headers["x-amz-target"])
    yield of_operation(service, operation, body)


def of_operation(service: str, operation: str, body: Mapping[str, Any]) -> Call:
    """The authorization of an operation with these parameters, of a service with a JSON or a query protocol."""
    action = f"{service}:{operation}"
    if service == "states":
        return Call.of(action, body.get("executionArn") or body["stateMachineArn"])
    if service == "dynamodb":
        return Call.of(action, f"arn:aws:dynamodb:{_HERE}:table/{body['TableName']}", _of_item(operation, body))
    if service == "kms":
        algorithm = {"kms:SigningAlgorithm": body["SigningAlgorithm"]} if "SigningAlgorithm" in body else {}
        return Call.of(action, body["KeyId"], algorithm)
    if service == "logs":
        stream = body["logStreamName"]
        return Call.of(action, f"arn:aws:logs:{_HERE}:log-group:{body['logGroupName']}:log-stream:{stream}")
    if service == "cloudwatch":
        return Call.of(action, "*")  # no resource-level permissions for GetMetricData and DescribeAlarms
    raise UnknownCall(action)


def _of_item(operation: str, body: Mapping[str, Any]) -> dict[str, str | tuple[str, ...]]:
    """DynamoDB's condition keys: the partition key, and the attributes that an expression names."""
    leading = {"dynamodb:LeadingKeys": tuple(value["S"] for value in body["Key"].values())}
    if operation == "GetItem":
        return {**leading}
    named = body.get("ExpressionAttributeNames", {})
    attributes = {"dynamodb:Attributes": tuple(sorted({*body["Key"], *named.values()}))}
    returned = {"dynamodb:ReturnValues": body["ReturnValues"]} if "ReturnValues" in body else {}
    return {**leading, **attributes, **returned}


# Query protocols


def _of_query(wire: Wire) -> Iterator[Call]:
    body = dict(parse_qsl(wire.body.decode()))
    if "Action" not in body:
        raise UnknownCall(f"{wire.service}: {wire.method} {wire.url}")
    action = f"{wire.service}:{body['Action']}"
    if action == "autoscaling:CompleteLifecycleAction":
        yield Call.of(action, group_arn(body["AutoScalingGroupName"]))
    elif action in FREE or body["Action"].startswith("Describe"):
        yield Call.of(action, "*")
    else:
        raise UnknownCall(action)


def group_arn(name: str) -> str:
    return f"arn:aws:autoscaling:{_HERE}:autoScalingGroup:0a1b2c3d:autoScalingGroupName/{name}"
