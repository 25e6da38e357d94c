"""The test case of a provider: a resource with all properties, and later changes of some of them."""

from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True)
class Case:
    """A test case: `later` are changed properties, `dependencies` are the resources that this one needs."""

    type: str
    first: dict[str, Any]
    later: dict[str, Any] = field(default_factory=dict)
    dependencies: dict[str, Any] = field(default_factory=dict)
    removed: tuple[str, ...] = ()  # properties that the change removes

    @property
    def afterwards(self) -> dict[str, Any]:
        return {key: value for key, value in {**self.first, **self.later}.items() if key not in self.removed}


def ref(name: str, attribute: str | None = None) -> dict[str, Any]:
    return {"Fn::GetAtt": [name, attribute]} if attribute else {"Ref": name}


def tags(**properties: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in properties.items()]


def role(service: str) -> dict[str, Any]:
    principal = {"Effect": "Allow", "Principal": {"Service": f"{service}.amazonaws.com"}, "Action": "sts:AssumeRole"}
    document = {"Version": "2012-10-17", "Statement": [principal]}
    return {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": document}}


NETWORK: Final = {
    "Vpc": {"Type": "AWS::EC2::VPC", "Properties": {"CidrBlock": "10.9.0.0/16"}},
    "A": {
        "Type": "AWS::EC2::Subnet",
        "Properties": {"VpcId": ref("Vpc"), "CidrBlock": "10.9.0.0/24", "AvailabilityZone": "us-east-2a"},
    },
    "B": {
        "Type": "AWS::EC2::Subnet",
        "Properties": {"VpcId": ref("Vpc"), "CidrBlock": "10.9.1.0/24", "AvailabilityZone": "us-east-2b"},
    },
    "Group": {
        "Type": "AWS::EC2::SecurityGroup",
        "Properties": {"GroupDescription": "one", "VpcId": ref("Vpc")},
    },
    "Other": {
        "Type": "AWS::EC2::SecurityGroup",
        "Properties": {"GroupDescription": "another", "VpcId": ref("Vpc")},
    },
}

DENIAL: Final = {
    "Version": "2012-10-17",
    "Statement": [
        {
            "Effect": "Deny",
            "Principal": {"AWS": "*"},
            "Action": "*",
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
    ],
}

LOGS: Final = {"Logs": {"Type": "AWS::Logs::LogGroup", "Properties": {"LogGroupName": "/nxpipe/case"}}}

TOPIC: Final = {"Topic": {"Type": "AWS::SNS::Topic", "Properties": {}}}
