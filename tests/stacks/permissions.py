"""Evaluation of deployed IAM policies. An unknown operator is an error."""

import json
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import boto3

Context: TypeAlias = Mapping[str, str]
Statement: TypeAlias = Mapping[str, Any]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _same(wanted: Any, found: str | None) -> bool:
    return found is not None and found in _listed(wanted)


def _like(wanted: Any, found: str | None) -> bool:
    return found is not None and any(fnmatchcase(found, entry) for entry in _listed(wanted))


def _absent(wanted: Any, found: str | None) -> bool:
    return (str(wanted).lower() == "true") == (found is None)


_OPERATORS: Final[Mapping[str, Callable[[Any, str | None], bool]]] = {
    "StringEquals": _same,
    "StringLike": _like,
    "ArnEquals": _like,
    "ArnLike": _like,
    "Bool": _same,
    "Null": _absent,
}


def holds(statement: Statement, context: Context) -> bool:
    return all(
        _OPERATORS[operator](wanted, context.get(key))
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def allowed(statements: list[Statement], action: str, resource: str, context: Context | None = None) -> bool:
    """A denial overrides every permission; without a permission an action is denied."""
    result = [
        statement["Effect"]
        for statement in statements
        if any(fnmatchcase(action.lower(), entry.lower()) for entry in _listed(statement["Action"]))
        and (
            "Resource" not in statement or any(fnmatchcase(resource, entry) for entry in _listed(statement["Resource"]))
        )
        and holds(statement, context or {})
    ]
    return "Allow" in result and "Deny" not in result


def statements_of(role: str) -> list[Statement]:
    """All statements of a deployed role, from inline and attached policies."""
    return list(_statements(boto3.client("iam"), role))


def _statements(iam: Any, role: str) -> Iterator[Statement]:
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        yield from _listed(iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]["Statement"])
    for attached_policy in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        version = iam.get_policy(PolicyArn=attached_policy["PolicyArn"])["Policy"]["DefaultVersionId"]
        document = iam.get_policy_version(PolicyArn=attached_policy["PolicyArn"], VersionId=version)["PolicyVersion"][
            "Document"
        ]
        yield from _listed(document["Statement"])


def trust_of(role: str) -> list[Statement]:
    found = boto3.client("iam").get_role(RoleName=role)["Role"]["AssumeRolePolicyDocument"]
    document = json.loads(unquote(found)) if isinstance(found, str) else found
    return _listed(document["Statement"])
