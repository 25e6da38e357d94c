"""References between stacks that cannot go stale: exports of what stays, Parameter Store for what comes and goes.

The network and the store export the values that others use, whether a stack uses them today or not: an export that
followed its users would leave the template together with the last of them, and CloudFormation refuses that while the
user's stack still exists. CDK makes an `Fn::ImportValue` of each use ("strong", `STRONG`).

All other stacks come and go, or replace resources that others name. `by_value` passes one of their values on in a
parameter of Systems Manager. Each change set of the consumer reads it: a new value is a change, an equal one is not.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from aws_cdk import CfnParameter, Reference, Stack, Tokenization, aws_iam, aws_ssm
from constructs import Construct

from nxpipe.stacks.lint.template import PUBLISHED

# An App's `post_cli_context`: it also holds for a cdk.json of an older version, which has "weak".
STRONG: Final = {"@aws-cdk/core:defaultCrossStackReferences": "strong"}

_SCOPE: Final = "ByValue"


def export(stack: Stack, *values: str) -> None:
    """Export values of a stack that stays, whether another stack uses them today or not."""
    for value in values:
        stack.export_value(value)


def role_by_value(scope: Construct, role: aws_iam.IRole) -> aws_iam.IRole:
    """A role of another stack, as one that policies in the stack of `scope` can be attached to."""
    return aws_iam.Role.from_role_name(
        scope, f"{role.node.path.replace('/', '-')}-by-value", by_value(scope, role.role_name)
    )


def by_value(scope: Construct, value: str) -> str:
    """A value of a resource in another stack, such as `topic.topic_arn`, for use in the stack of `scope`.

    A value of the own stack, and one that is known at synthesis, is returned as it is.
    """
    reference = Tokenization.reverse_complete_string(value)
    consumer = Stack.of(scope)
    if reference is None or not Reference.is_reference(reference):
        return value
    producer = Stack.of(reference.target)
    if producer.node.path == consumer.node.path:
        return value
    id_, attribute = _place(producer.resolve(value))
    name = f"{PUBLISHED}{producer.stack_name}/{id_}/{attribute}"
    published = _child_scope(producer)
    if published.node.try_find_child(f"{id_}{attribute}") is None:
        aws_ssm.CfnParameter(published, f"{id_}{attribute}", name=name, type="String", value=value)
    current: str = _parameter(consumer, producer, name).value_as_string
    return current


def _place(resolved: Mapping[str, Any]) -> tuple[str, str]:
    """Logical id and attribute of a Ref or GetAtt."""
    if "Ref" in resolved:
        return str(resolved["Ref"]), "Ref"
    id_, attribute = resolved["Fn::GetAtt"]
    return id_, attribute


def _parameter(consumer: Stack, producer: Stack, name: str) -> CfnParameter:
    scope = _child_scope(consumer)
    id_ = re.sub(r"\W", "", name.removeprefix(PUBLISHED))
    found = scope.node.try_find_child(id_)
    if isinstance(found, CfnParameter):
        return found
    consumer.add_stack_dependency(producer, f"{name} is read when a change set is created")
    return CfnParameter(
        scope,
        id_,
        type="AWS::SSM::Parameter::Value<String>",
        default=name,
        description=f"A value of stack {producer.stack_name}",
    )


def _child_scope(stack: Stack) -> Construct:
    found = stack.node.try_find_child(_SCOPE)
    return found if found is not None else Construct(stack, _SCOPE)
