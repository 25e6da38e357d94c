"""Which resources name a role, which service takes it for them, and what they must wait for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.iam.templates import Role, Templates

# The service that takes a role for a resource of a type.
SERVICES: Final = {
    "AWS::Batch::JobDefinition": "ecs-tasks",
    "AWS::EC2::FlowLog": "vpc-flow-logs",
    "AWS::EKS::Addon": "pods.eks",
    "AWS::EKS::Cluster": "eks",
    "AWS::EKS::Nodegroup": "ec2",
    "AWS::EKS::PodIdentityAssociation": "pods.eks",
    "AWS::Events::Rule": "events",
    "AWS::IAM::InstanceProfile": "ec2",
    "AWS::Lambda::Function": "lambda",
    "AWS::SageMaker::Model": "sagemaker",
    "AWS::Scheduler::Schedule": "scheduler",
    "AWS::StepFunctions::StateMachine": "states",
}
_POLICIES: Final = ("AWS::IAM::ManagedPolicy", "AWS::IAM::Policy")
_NOT_TAKERS: Final = (*_POLICIES, "AWS::IAM::Role", "AWS::SSM::Parameter")  # a parameter tells other stacks its name


@dataclass(frozen=True)
class Take:
    """A resource that names a role, which a service takes for it."""

    role: Role
    id: str
    type: str
    properties: Mapping[str, Any] = field(repr=False)  # without intrinsic functions


def takes(templates: Templates) -> Iterator[Take]:
    """Every resource that names a role, by ARN or by name."""
    for stack, template in templates.stacks.items():
        roles = [role for role in templates.roles.values() if role.stack == stack]
        names = {key: role for role in roles for key in (role.principal.id, templates.name(stack, role.id))}
        for id_, resource in template["Resources"].items():
            if resource["Type"] in _NOT_TAKERS or not names:
                continue
            properties = templates.resolve(stack, resource.get("Properties", {}))
            for text in sorted(set(_texts(properties)) & names.keys()):
                yield Take(names[text], id_, resource["Type"], properties)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry)


def hurried(templates: Templates) -> Iterator[str]:
    """Resources that may be created before the policies of the role that they name."""
    for take in takes(templates):
        stack, role = take.role.stack, take.role
        resources = templates.stacks[stack]["Resources"]
        waits = _waits(resources, take.id)
        for id_, resource in resources.items():
            if resource["Type"] not in _POLICIES or id_ in waits:
                continue
            if templates.name(stack, role.id) in templates.resolve(stack, resource["Properties"].get("Roles", [])):
                yield f"{stack}/{take.id} takes {role.id} and does not wait for its policy {id_}"


def _waits(resources: Mapping[str, Any], id_: str) -> set[str]:
    """The resources that CloudFormation creates before a resource: dependencies, references, and theirs."""
    found: set[str] = set()
    new = [id_]
    while new:
        resource = resources[new.pop()]
        depends = resource.get("DependsOn", [])
        named = {*([depends] if isinstance(depends, str) else depends), *_references(resource.get("Properties", {}))}
        new += sorted((named & resources.keys()) - found)
        found |= named
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("Ref"), str):
            yield value["Ref"]
        if isinstance(value.get("Fn::GetAtt"), list):
            yield value["Fn::GetAtt"][0]
        for entry in value.values():
            yield from _references(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _references(entry)
