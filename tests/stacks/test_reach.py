"""The calls of each principal, derived from the resources of a template."""

from typing import Any

import pytest

from nxpipe.stacks.lint.egress import Need, Unreachable, missing_endpoints, needs, unused_endpoints

INSTANCE = {
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}]
}
ROLE = {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": INSTANCE}}


def trusting(service: Any) -> dict[str, Any]:
    trust = {"Statement": [{"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}]}
    return {"Type": "AWS::IAM::Role", "Properties": {"AssumeRolePolicyDocument": trust}}


def policy(*statements: dict[str, Any], type_: str = "AWS::IAM::Policy") -> dict[str, Any]:
    document = {"Statement": [{"Effect": "Allow", "Resource": "arn:x", **statement} for statement in statements]}
    return {"Type": type_, "Properties": {"PolicyDocument": document, "Roles": [{"Ref": "Role"}]}}


def managed(arn: Any) -> dict[str, Any]:
    return {"Type": "AWS::IAM::Role", "Properties": {**ROLE["Properties"], "ManagedPolicyArns": [arn]}}  # type: ignore[dict-item]


def booting(*lines: Any) -> dict[str, Any]:
    script = {"Fn::Base64": {"Fn::Join": ["", list(lines)]}}
    return {"Type": "AWS::EC2::LaunchTemplate", "Properties": {"LaunchTemplateData": {"UserData": script}}}


def running(image: Any) -> dict[str, Any]:
    nodes = {"NodeRangeProperties": [{"Container": {"Image": image}}]}
    return {"Type": "AWS::Batch::JobDefinition", "Properties": {"NodeProperties": nodes}}


def endpoints(**resources: dict[str, Any]) -> set[str]:
    return {need.endpoint for need in needs("demo-fleet", resources)}


OWN_IMAGE = {"Fn::Join": ["", ["123456789012.dkr.ecr.", {"Ref": "AWS::Region"}, ".amazonaws.com/train@sha256:0"]]}
SSM = {"Fn::Join": ["", ["arn:", {"Ref": "AWS::Partition"}, ":iam::aws:policy/AmazonSSMManagedInstanceCore"]]}

CALLS: dict[str, tuple[dict[str, dict[str, Any]], set[str]]] = {
    "an action of an instance's role": ({"Role": ROLE, "Policy": policy({"Action": "logs:PutLogEvents"})}, {"logs"}),
    "actions of a managed policy of our own": (
        {"Role": ROLE, "Policy": policy({"Action": ["sqs:SendMessage"]}, type_="AWS::IAM::ManagedPolicy")},
        {"sqs"},
    ),
    "a managed policy that the role names": (
        {"Role": managed({"Ref": "Own"}), "Own": policy({"Action": "sns:Publish"}, type_="AWS::IAM::ManagedPolicy")},
        {"sns"},
    ),
    "actions inside of a role": (
        {
            "Role": {
                "Type": "AWS::IAM::Role",
                "Properties": {
                    "AssumeRolePolicyDocument": INSTANCE,
                    "Policies": [
                        {"PolicyDocument": policy({"Action": "ec2:DescribeTags"})["Properties"]["PolicyDocument"]}
                    ],
                },
            }
        },
        {"ec2"},
    ),
    "a managed policy of AWS": ({"Role": managed(SSM)}, {"ec2messages", "ssm", "ssmmessages"}),
    "the role of a container": (
        {"Role": trusting("ecs-tasks.amazonaws.com"), "Policy": policy({"Action": "s3:GetObject"})},
        {"s3"},
    ),
    "a caller of SageMaker's endpoints": (
        {"Role": ROLE, "Policy": policy({"Action": "sagemaker:InvokeEndpoint"})},
        {"sagemaker.runtime"},
    ),
    "SageMaker, which fetches a model by the network that it is given": (
        {"Model": {"Type": "AWS::SageMaker::Model", "Properties": {"VpcConfig": {"Subnets": ["subnet-1"]}}}},
        {"s3"},
    ),
    "SageMaker, which is given no network": (
        {"Model": {"Type": "AWS::SageMaker::Model", "Properties": {}}},
        set(),
    ),
    "the role of a service, which calls from elsewhere": (
        {"Role": trusting("vpc-flow-logs.amazonaws.com"), "Policy": policy({"Action": "logs:PutLogEvents"})},
        set(),
    ),
    "a denial": ({"Role": ROLE, "Policy": policy({"Effect": "Deny", "Action": "sqs:*"})}, set()),
    "a key that S3 uses for the caller": (
        {
            "Role": ROLE,
            "Policy": policy({"Action": "kms:Decrypt", "Condition": {"StringEquals": {"kms:ViaService": "s3.x"}}}),
        },
        set(),
    ),
    "a key that is called": ({"Role": ROLE, "Policy": policy({"Action": "kms:Sign"})}, {"kms"}),
    "a file system, which is mounted": (
        {
            "Role": ROLE,
            "Policy": policy({"Action": ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]}),
        },
        set(),
    ),
    "an image of a multi-node job": ({"Job": running(OWN_IMAGE)}, {"ecr.api", "ecr.dkr", "logs", "s3"}),
    "the agent of Batch": (
        {"Machines": {"Type": "AWS::Batch::ComputeEnvironment", "Properties": {}}},
        {"ecs", "ecs-agent", "ecs-telemetry"},
    ),
    "commands of a script": (
        {
            "Template": booting(
                "#!/bin/bash\n# aws sqs is what this does not call\naws configure set region us-east-2\n",
                'if aws --region "$REGION" s3 cp s3://',
                {"Ref": "Bucket"},
                "/agent . ; then aws elbv2 describe-rules; fi\n",
            )
        },
        {"elasticloadbalancing", "s3"},
    ),
    "addresses of a script": (
        {
            "Template": booting(
                "curl http://169.254.169.254/latest\ncurl https://sqs.",
                {"Ref": "AWS::Region"},
                ".amazonaws.com/\ncurl https://",
                {"Fn::GetAtt": ["Front", "DNSName"]},
                "/health\n",
            )
        },
        {"sqs"},
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_what_is_called_from_inside_is_known_and_what_is_not_called_is_not(what: str) -> None:
    resources, wanted = CALLS[what]
    assert endpoints(**resources) == wanted


UNREACHABLE: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "Policy calls organizations": ({"Role": ROLE, "Policy": policy({"Action": "organizations:ListRoots"})}, "nat"),
    "Policy has permission for every action": ({"Role": ROLE, "Policy": policy({"Action": "*"})}, "list its actions"),
    "Role has the policy AdministratorAccess": (
        {"Role": managed("arn:aws:iam::aws:policy/AdministratorAccess")},
        "list the actions in a policy",
    ),
    "Job runs public.ecr.aws/train:latest": ({"Job": running("public.ecr.aws/train:latest")}, "own repository"),
    "Template calls pypi.example": ({"Template": booting("curl https://pypi.example/simple\n")}, "use S3 instead"),
}


@pytest.mark.parametrize("caller", UNREACHABLE)
def test_what_no_endpoint_leads_to_is_refused_with_the_callers_name_and_a_way_out(caller: str) -> None:
    resources, way_out = UNREACHABLE[caller]
    with pytest.raises(Unreachable, match=f"^demo-fleet/{caller}.*{way_out}"):
        endpoints(**resources)


def test_an_endpoint_is_missing_by_the_name_of_its_caller_and_idle_without_one() -> None:
    wanted = [Need("logs", "demo-fleet/Role", "logs:PutLogEvents"), Need("s3", "demo-fleet/Role", "s3:GetObject")]
    assert missing_endpoints(wanted, ["s3"]) == [
        "demo-fleet/Role needs the endpoint logs (logs:PutLogEvents), which the network does not have"
    ]
    assert missing_endpoints(wanted, ["s3", "logs"]) == []
    assert unused_endpoints(wanted, ["s3", "logs", "sqs"]) == ["sqs"]
