"""The statements of deployed IAM policies, for tests/iam/evaluator.py."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import boto3

from tests.iam.evaluator import Context, Statement, allowed, as_list

__all__ = ["Context", "Statement", "allowed", "statements_of", "trust_of"]


def statements_of(role: str) -> list[Statement]:
    """All statements of a deployed role, from inline and attached policies."""
    return list(_statements(boto3.client("iam"), role))


def _statements(iam: Any, role: str) -> Iterator[Statement]:
    for name in iam.list_role_policies(RoleName=role)["PolicyNames"]:
        yield from as_list(iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]["Statement"])
    for attached_policy in iam.list_attached_role_policies(RoleName=role)["AttachedPolicies"]:
        version = iam.get_policy(PolicyArn=attached_policy["PolicyArn"])["Policy"]["DefaultVersionId"]
        document = iam.get_policy_version(PolicyArn=attached_policy["PolicyArn"], VersionId=version)["PolicyVersion"][
            "Document"
        ]
        yield from as_list(document["Statement"])


def trust_of(role: str) -> list[Statement]:
    found = boto3.client("iam").get_role(RoleName=role)["Role"]["AssumeRolePolicyDocument"]
    document = json.loads(unquote(found)) if isinstance(found, str) else found
    return as_list(document["Statement"])
