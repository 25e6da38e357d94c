"""Lambda functions and their resource policies."""

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import labels, listed, removed_tags, shaped

_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@provides
class Function(Provider):
    type = "AWS::Lambda::Function"
    properties = frozenset(
        {
            "Architectures",
            "Code",
            "Description",
            "Environment",
            "EphemeralStorage",
            "FunctionName",
            "Handler",
            "KmsKeyArn",
            "Layers",
            "LoggingConfig",
            "MemorySize",
            "ReservedConcurrentExecutions",
            "Role",
            "Runtime",
            "Tags",
            "Timeout",
            "TracingConfig",
            "VpcConfig",
        }
    )
    fixed = frozenset({"FunctionName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        functions, name = site.client("lambda"), desired.get("FunctionName") or site.name(64)
        arguments = {**desired, "FunctionName": name, "Code": _code(desired["Code"]), "Tags": labels(desired)}
        own = frozenset({"ReservedConcurrentExecutions"})
        response = functions.create_function(**shaped(functions, "create_function", arguments, exclude=own))
        resource = PhysicalResource(name, {"Arn": response["FunctionArn"]}, {"Code": desired["Code"]})
        site.begin(resource)
        self._reserve(functions, name, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        functions = site.client("lambda")
        if before["Code"] != desired["Code"] or before.get("Architectures") != desired.get("Architectures"):
            code = {**_code(desired["Code"]), "FunctionName": resource.id}
            if "Architectures" in desired:
                code["Architectures"] = desired["Architectures"]
            functions.update_function_code(**shaped(functions, "update_function_code", code))
        own = frozenset({"Architectures", "Code", "ReservedConcurrentExecutions", "Tags"})
        settings = shaped(
            functions, "update_function_configuration", {**desired, "FunctionName": resource.id}, exclude=own
        )
        functions.update_function_configuration(**settings)
        self._reserve(functions, resource.id, before, desired)
        if names := removed_tags(before, desired):
            functions.untag_resource(Resource=resource.attributes["Arn"], TagKeys=names)
        functions.tag_resource(Resource=resource.attributes["Arn"], Tags=labels(desired))
        return PhysicalResource(resource.id, resource.attributes, {"Code": desired["Code"]})

    def _reserve(self, functions: Any, name: str, before: Properties, desired: Properties) -> None:
        key = "ReservedConcurrentExecutions"
        if key in desired:
            functions.put_function_concurrency(FunctionName=name, ReservedConcurrentExecutions=int(desired[key]))
        elif key in before:
            functions.delete_function_concurrency(FunctionName=name)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("lambda").delete_function(FunctionName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        """The service returns only a digest of the code; the template's code is returned if its digest is the same."""
        response = site.client("lambda").get_function(FunctionName=resource.id)
        actual: dict[str, Any] = dict(response["Configuration"])
        code = resource.state["Code"]
        actual["Code"] = code if actual["CodeSha256"] == _digest(code, site) else None
        actual["Layers"] = [layer["Arn"] for layer in actual.get("Layers", [])]
        actual["Tags"] = listed(response.get("Tags", {}))
        actual["ReservedConcurrentExecutions"] = response.get("Concurrency", {}).get("ReservedConcurrentExecutions")
        return actual


def _code(desired: Mapping[str, Any]) -> Mapping[str, Any]:
    """The code; inline code becomes a module named index."""
    if "ZipFile" not in desired:
        return desired
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo("index.py", _LONG_AGO), desired["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _digest(code: Mapping[str, Any], site: Site) -> str:
    if "ZipFile" in code:
        content = _code(code)["ZipFile"]
    else:
        content = site.client("s3").get_object(Bucket=code["S3Bucket"], Key=code["S3Key"])["Body"].read()
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


@provides
class Permission(Provider):
    type = "AWS::Lambda::Permission"
    properties = frozenset({"Action", "FunctionName", "Principal", "SourceAccount", "SourceArn"})
    fixed = properties

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        functions, name = site.client("lambda"), site.name(100)
        arguments = {**desired, "StatementId": name}
        functions.add_permission(**shaped(functions, "add_permission", arguments))
        return PhysicalResource(name, state={"Function": desired["FunctionName"]})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("lambda").remove_permission(FunctionName=properties["FunctionName"], StatementId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        policy = site.client("lambda").get_policy(FunctionName=resource.state["Function"])["Policy"]
        actual = next(entry for entry in json.loads(policy)["Statement"] if entry["Sid"] == resource.id)
        principal, condition = actual["Principal"], actual.get("Condition", {})
        return {
            "Action": actual["Action"],
            "FunctionName": resource.state["Function"],
            "Principal": principal if isinstance(principal, str) else next(iter(principal.values())),
            "SourceAccount": condition.get("StringEquals", {}).get("AWS:SourceAccount"),
            "SourceArn": condition.get("ArnLike", {}).get("AWS:SourceArn"),
        }
