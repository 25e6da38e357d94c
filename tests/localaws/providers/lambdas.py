"""Functions, and who may call them."""

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, labels, listed, shaped

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

    def create(self, wanted: Properties, at: Site) -> Made:
        functions, name = at.client("lambda"), wanted.get("FunctionName") or at.name(64)
        given = {**wanted, "FunctionName": name, "Code": _code(wanted["Code"]), "Tags": labels(wanted)}
        own = frozenset({"ReservedConcurrentExecutions"})
        told = functions.create_function(**shaped(functions, "create_function", given, but=own))
        made = Made(name, {"Arn": told["FunctionArn"]}, {"Code": wanted["Code"]})
        at.begin(made)
        self._reserve(functions, name, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        functions = at.client("lambda")
        if before["Code"] != wanted["Code"] or before.get("Architectures") != wanted.get("Architectures"):
            code = {**_code(wanted["Code"]), "FunctionName": made.id}
            if "Architectures" in wanted:
                code["Architectures"] = wanted["Architectures"]
            functions.update_function_code(**shaped(functions, "update_function_code", code))
        own = frozenset({"Architectures", "Code", "ReservedConcurrentExecutions", "Tags"})
        settings = shaped(functions, "update_function_configuration", {**wanted, "FunctionName": made.id}, but=own)
        functions.update_function_configuration(**settings)
        self._reserve(functions, made.id, before, wanted)
        if names := gone(before, wanted):
            functions.untag_resource(Resource=made.attributes["Arn"], TagKeys=names)
        functions.tag_resource(Resource=made.attributes["Arn"], Tags=labels(wanted))
        return Made(made.id, made.attributes, {"Code": wanted["Code"]})

    def _reserve(self, functions: Any, name: str, before: Properties, wanted: Properties) -> None:
        key = "ReservedConcurrentExecutions"
        if key in wanted:
            functions.put_function_concurrency(FunctionName=name, ReservedConcurrentExecutions=int(wanted[key]))
        elif key in before:
            functions.delete_function_concurrency(FunctionName=name)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("lambda").delete_function(FunctionName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        """The service tells of its code only the digest: the wanted code is found if it has the same."""
        told = at.client("lambda").get_function(FunctionName=made.id)
        found: dict[str, Any] = dict(told["Configuration"])
        code = made.kept["Code"]
        found["Code"] = code if found["CodeSha256"] == _digest(code, at) else None
        found["Layers"] = [one["Arn"] for one in found.get("Layers", [])]
        found["Tags"] = listed(told.get("Tags", {}))
        found["ReservedConcurrentExecutions"] = told.get("Concurrency", {}).get("ReservedConcurrentExecutions")
        return found


def _code(wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """Code that stands in the template itself is a module named index."""
    if "ZipFile" not in wanted:
        return wanted
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(zipfile.ZipInfo("index.py", _LONG_AGO), wanted["ZipFile"])
    return {"ZipFile": packed.getvalue()}


def _digest(code: Mapping[str, Any], at: Site) -> str:
    if "ZipFile" in code:
        content = _code(code)["ZipFile"]
    else:
        content = at.client("s3").get_object(Bucket=code["S3Bucket"], Key=code["S3Key"])["Body"].read()
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


@provides
class Permission(Provider):
    type = "AWS::Lambda::Permission"
    properties = frozenset({"Action", "FunctionName", "Principal", "SourceAccount", "SourceArn"})
    fixed = properties

    def create(self, wanted: Properties, at: Site) -> Made:
        functions, name = at.client("lambda"), at.name(100)
        given = {**wanted, "StatementId": name}
        functions.add_permission(**shaped(functions, "add_permission", given))
        return Made(name, kept={"Function": wanted["FunctionName"]})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("lambda").remove_permission(FunctionName=properties["FunctionName"], StatementId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("lambda").get_policy(FunctionName=made.kept["Function"])["Policy"]
        found = next(one for one in json.loads(told)["Statement"] if one["Sid"] == made.id)
        who, condition = found["Principal"], found.get("Condition", {})
        return {
            "Action": found["Action"],
            "FunctionName": made.kept["Function"],
            "Principal": who if isinstance(who, str) else next(iter(who.values())),
            "SourceAccount": condition.get("StringEquals", {}).get("AWS:SourceAccount"),
            "SourceArn": condition.get("ArnLike", {}).get("AWS:SourceArn"),
        }
