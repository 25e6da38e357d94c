"""Policies of synthesised templates, with every intrinsic function resolved to the names of one account.

A resource without a name in its template is `STACK-LOGICALID`; a bucket's has no hash. An attribute without an
entry in `_ARNS` is `STACK.LOGICALID.ATTRIBUTE`, which equals itself and nothing else.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Final, TypeAlias

from moto.iam.aws_managed_policies import aws_managed_policies_data

from tests.iam.evaluator import Principal, Statement, as_list, statements_in

ACCOUNT: Final = "123456789012"
REGION: Final = "us-east-2"
Template: TypeAlias = Mapping[str, Any]

_PSEUDO: Final = {
    "AWS::AccountId": ACCOUNT,
    "AWS::Partition": "aws",
    "AWS::Region": REGION,
    "AWS::URLSuffix": "amazonaws.com",
}
_NAMES: Final = {  # the property with the name of a resource
    "AWS::AutoScaling::AutoScalingGroup": "AutoScalingGroupName",
    "AWS::Batch::JobDefinition": "JobDefinitionName",
    "AWS::Batch::JobQueue": "JobQueueName",
    "AWS::DynamoDB::Table": "TableName",
    "AWS::EKS::Nodegroup": "NodegroupName",
    "AWS::IAM::Role": "RoleName",
    "AWS::Lambda::Function": "FunctionName",
    "AWS::Logs::LogGroup": "LogGroupName",
    "AWS::SNS::Topic": "TopicName",
    "AWS::StepFunctions::StateMachine": "StateMachineName",
}
_VARIABLE: Final = re.compile(r"\$\{([^}]+)\}")  # of Fn::Sub
_HERE: Final = f"{REGION}:{ACCOUNT}"
# The ARN of a resource by its name, and whether Ref is the ARN.
_ARNS: Final = {
    "AWS::Batch::ComputeEnvironment": (f"arn:aws:batch:{_HERE}:compute-environment/{{}}", True),
    "AWS::Batch::JobDefinition": (f"arn:aws:batch:{_HERE}:job-definition/{{}}:1", True),
    "AWS::Batch::JobQueue": (f"arn:aws:batch:{_HERE}:job-queue/{{}}", True),
    "AWS::DynamoDB::Table": (f"arn:aws:dynamodb:{_HERE}:table/{{}}", False),
    "AWS::ECR::Repository": (f"arn:aws:ecr:{_HERE}:repository/{{}}", False),
    "AWS::EFS::AccessPoint": (f"arn:aws:elasticfilesystem:{_HERE}:access-point/{{}}", False),
    "AWS::EFS::FileSystem": (f"arn:aws:elasticfilesystem:{_HERE}:file-system/{{}}", False),
    "AWS::EKS::Nodegroup": (f"arn:aws:eks:{_HERE}:nodegroup/demo/{{}}/0a1b2c3d", False),
    "AWS::ElasticLoadBalancingV2::ListenerRule": (
        f"arn:aws:elasticloadbalancing:{_HERE}:listener-rule/app/{{}}/1/2/3",
        True,
    ),
    "AWS::ElasticLoadBalancingV2::TargetGroup": (f"arn:aws:elasticloadbalancing:{_HERE}:targetgroup/{{}}/1", True),
    "AWS::IAM::ManagedPolicy": (f"arn:aws:iam::{ACCOUNT}:policy/nxpipe/{{}}", True),
    "AWS::IAM::OIDCProvider": (f"arn:aws:iam::{ACCOUNT}:oidc-provider/token.actions.githubusercontent.com", True),
    "AWS::IAM::Role": (f"arn:aws:iam::{ACCOUNT}:role/nxpipe/{{}}", False),
    "AWS::KMS::Key": (f"arn:aws:kms:{_HERE}:key/{{}}", False),
    "AWS::Lambda::Function": (f"arn:aws:lambda:{_HERE}:function:{{}}", False),
    "AWS::Logs::LogGroup": (f"arn:aws:logs:{_HERE}:log-group:{{}}:*", False),
    "AWS::S3::Bucket": ("arn:aws:s3:::{}", False),
    "AWS::SNS::Topic": (f"arn:aws:sns:{_HERE}:{{}}", True),
    "AWS::StepFunctions::StateMachine": (f"arn:aws:states:{_HERE}:stateMachine:{{}}", True),
}
_ARN_ATTRIBUTES: Final = {"Arn", "FileSystemArn", "JobQueueArn", "RuleArn", "TargetGroupArn", "TopicArn"}


_MANAGED: Final = "arn:aws:iam::aws:policy/"


@cache
def _managed_policies() -> Mapping[str, Any]:
    """All AWS managed policies as AWS's API returned them to the authors of moto."""
    policies: Mapping[str, Any] = json.loads(aws_managed_policies_data)
    return policies


def managed_policy(name: str) -> list[Statement]:
    return statements_in(_managed_policies()[name.rpartition("/")[2]]["Document"])


@dataclass(frozen=True)
class Templates:
    """The templates of all stacks of a project, by stack."""

    stacks: Mapping[str, Template] = field(repr=False)

    def resources(self, *types: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Stack, logical id and properties."""
        for stack, template in self.stacks.items():
            for id_, resource in template["Resources"].items():
                if resource["Type"] in types:
                    yield stack, id_, resource.get("Properties", {})

    def find(self, type_: str, stack: str, start: str = "") -> str:
        """The logical id of the only resource of a type whose logical id begins so."""
        (id_,) = (
            id_
            for id_, entry in self.stacks[stack]["Resources"].items()
            if entry["Type"] == type_ and id_.startswith(start)
        )
        return str(id_)

    def name(self, stack: str, id_: str) -> str:
        resource = self.stacks[stack]["Resources"][id_]
        given = resource.get("Properties", {}).get(_NAMES.get(resource["Type"], ""))
        if given is not None:
            return str(self.resolve(stack, given))
        return f"{stack}-{id_[:-8]}".lower() if resource["Type"] == "AWS::S3::Bucket" else f"{stack}-{id_}"

    def arn(self, stack: str, id_: str) -> str:
        form, _ = _ARNS[self.stacks[stack]["Resources"][id_]["Type"]]
        return form.format(self.name(stack, id_))

    def resolve(self, stack: str, value: Any) -> Any:
        """The value of a property, as it is at deployment."""
        if isinstance(value, list):
            return [self.resolve(stack, entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            ((function, argument),) = value.items()
            if function == "Ref":
                return self._ref(stack, argument)
            if function.startswith("Fn::"):
                return self._call(stack, function, argument)
        return {key: self.resolve(stack, entry) for key, entry in value.items()}

    def _ref(self, stack: str, id_: str) -> str:
        if id_ in _PSEUDO:
            return _PSEUDO[id_]
        if (parameter := self.stacks[stack].get("Parameters", {}).get(id_)) is not None:
            return self._stored(parameter.get("Default")) or f"{stack}.{id_}"
        _, ref_is_arn = _ARNS.get(self.stacks[stack]["Resources"][id_]["Type"], ("", False))
        return self.arn(stack, id_) if ref_is_arn else self.name(stack, id_)

    def _stored(self, name: object) -> str | None:
        """The value that another stack keeps under this name in Parameter Store."""
        for stack, _, properties in self.resources("AWS::SSM::Parameter"):
            if properties.get("Name") == name:
                return str(self.resolve(stack, properties["Value"]))
        return None

    def _exported(self, name: str) -> str:
        for stack, template in self.stacks.items():
            for output in template.get("Outputs", {}).values():
                if output.get("Export", {}).get("Name") == name:
                    return str(self.resolve(stack, output["Value"]))
        raise KeyError(name)

    def _call(self, stack: str, function: str, argument: Any) -> str:
        if function == "Fn::Join":
            separator, parts = argument
            return str(separator).join(str(self.resolve(stack, part)) for part in parts)
        if function == "Fn::ImportValue":
            return self._exported(argument)
        if function == "Fn::GetAtt":
            id_, attribute = argument
            known = self.stacks[stack]["Resources"][id_]["Type"] in _ARNS and attribute in _ARN_ATTRIBUTES
            return self.arn(stack, id_) if known else f"{stack}.{id_}.{attribute}"
        if function == "Fn::Sub":
            text, given = argument if isinstance(argument, list) else (argument, {})
            return _VARIABLE.sub(lambda found: str(self._variable(stack, found[1], given)), text)
        if function == "Fn::Base64":
            return str(self.resolve(stack, argument))
        if function == "Fn::Select":
            index, parts = argument
            return str(self.resolve(stack, parts)[int(index)])
        if function == "Fn::Split":
            separator, text = argument
            return self.resolve(stack, text).split(separator)  # type: ignore[no-any-return]
        raise NotImplementedError(f"{function} in {stack}")

    def _variable(self, stack: str, name: str, given: Mapping[str, Any]) -> Any:
        """A variable of Fn::Sub: of its own, a resource, or an attribute of one. `!` makes it plain text."""
        if name.startswith("!"):
            return f"${{{name[1:]}}}"
        if name in given:
            return self.resolve(stack, given[name])
        id_, _, attribute = name.partition(".")
        return self.resolve(stack, {"Fn::GetAtt": [id_, attribute]} if attribute else {"Ref": id_})

    # Policies

    @cached_property
    def roles(self) -> Mapping[str, "Role"]:
        """The roles of all stacks, by `STACK/LOGICALID`."""
        found = {f"{stack}/{id_}": Role(self, stack, id_) for stack, id_, _ in self.resources("AWS::IAM::Role")}
        by_name = {self.name(role.stack, role.id): role for role in found.values()}
        for stack, id_, properties in self.resources("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"):
            statements = statements_in(self.resolve(stack, properties["PolicyDocument"]))
            for name in self.resolve(stack, properties.get("Roles", [])):
                by_name[name].statements.extend((id_, statement) for statement in statements)
        return found

    def role(self, stack: str, start: str) -> "Role":
        return self.roles[f"{stack}/{self.find('AWS::IAM::Role', stack, start)}"]

    def policies_of_resources(self) -> Mapping[str, Sequence[Statement]]:
        """The statements of resource policies, by the ARN of a bucket, key, topic or file system."""
        found: dict[str, list[Statement]] = {}
        for stack, _, properties in self.resources("AWS::S3::BucketPolicy"):
            bucket = f"arn:aws:s3:::{self.resolve(stack, properties['Bucket'])}"
            found.setdefault(bucket, []).extend(statements_in(self.resolve(stack, properties["PolicyDocument"])))
        for stack, _, properties in self.resources("AWS::SNS::TopicPolicy"):
            for topic in self.resolve(stack, properties["Topics"]):
                found.setdefault(topic, []).extend(statements_in(self.resolve(stack, properties["PolicyDocument"])))
        for stack, id_, properties in self.resources("AWS::EFS::FileSystem"):
            found[self.arn(stack, id_)] = statements_in(self.resolve(stack, properties["FileSystemPolicy"]))
        for stack, id_, properties in self.resources("AWS::KMS::Key"):
            found[self.arn(stack, id_)] = statements_in(self.resolve(stack, properties["KeyPolicy"]))
        return found


@dataclass(frozen=True)
class Role:
    templates: Templates = field(repr=False)
    stack: str
    id: str
    statements: list[tuple[str, Statement]] = field(default_factory=list, repr=False)  # with the policy's logical id

    @property
    def principal(self) -> Principal:
        return Principal("AWS", self.templates.arn(self.stack, self.id))

    @property
    def properties(self) -> Mapping[str, Any]:
        properties: Mapping[str, Any] = self.templates.stacks[self.stack]["Resources"][self.id]["Properties"]
        return properties

    @property
    def own(self) -> list[Statement]:
        """The statements of its inline and attached policies, without those of AWS managed policies."""
        inline = [
            statement
            for policy in self.properties.get("Policies", [])
            for statement in statements_in(self.templates.resolve(self.stack, policy["PolicyDocument"]))
        ]
        return [*inline, *(statement for _, statement in self.statements)]

    @property
    def managed(self) -> Mapping[str, Sequence[Statement]]:
        """The statements of its AWS managed policies, by path and name."""
        arns = self.templates.resolve(self.stack, self.properties.get("ManagedPolicyArns", []))
        if foreign := [arn for arn in arns if not arn.startswith(_MANAGED)]:
            raise NotImplementedError(f"{self.id} has {foreign}: attach a policy of this project by its own `Roles`")
        return {name: managed_policy(name) for name in (arn.removeprefix(_MANAGED) for arn in arns)}

    @property
    def identity(self) -> list[Statement]:
        return [*self.own, *(statement for policy in self.managed.values() for statement in policy)]

    @property
    def trust(self) -> list[Statement]:
        document = self.templates.resolve(self.stack, self.properties["AssumeRolePolicyDocument"])
        return as_list(document["Statement"])
