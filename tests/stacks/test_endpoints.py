"""A closed network has endpoints for exactly the services that its instances call."""

from typing import Final

import boto3
import pytest
from aws_cdk import App, Stack, aws_ec2, aws_iam

from nxpipe.pipeline.config.cloud import ClosedNetwork, NatNetwork
from nxpipe.stacks.lint.egress import Unreachable
from nxpipe.stacks.network import Endpoints, NetworkStack
from tests.stacks.local import HERE, deploy, destroy, new_app, template_of

ZONES: Final = ("us-east-2a", "us-east-2b")
# What instances of a fleet call, and where that leads.
CALLS: Final = {
    "autoscaling:CompleteLifecycleAction": "autoscaling",
    "cloudwatch:PutMetricData": "monitoring",
    "ecr:GetAuthorizationToken": "ecr.api",
    "ecr:BatchGetImage": "ecr.dkr",
    "kms:Sign": "kms",
    "logs:PutLogEvents": "logs",
    "s3:GetObject": "s3",
    "ssm:UpdateInstanceInformation": "ssm",
    "ssmmessages:OpenDataChannel": "ssmmessages",
}


def fleet(app: App, *actions: str) -> Stack:
    stack = Stack(app, "demo-fleet", env=HERE)
    role = aws_iam.Role(stack, "Role", assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"))
    for action in actions:
        role.add_to_principal_policy(aws_iam.PolicyStatement(actions=[action], resources=["arn:aws:x:::y"]))
    return stack


def made(network: ClosedNetwork | NatNetwork, *actions: str) -> tuple[NetworkStack, Stack, Endpoints]:
    app = new_app()
    stack = NetworkStack(app, "demo-network", project="demo", network=network, zones=ZONES, env=HERE)
    caller = fleet(app, *actions)
    return stack, caller, Endpoints(stack, "Endpoints", network=stack.handle, callers=[caller])


def led_to(stack: NetworkStack) -> dict[str, str]:
    """The services and the type of each one's endpoint."""
    found = [
        resource["Properties"]
        for resource in template_of(stack)["Resources"].values()
        if "VPCEndpoint" in resource["Type"]
    ]
    return {_service(entry["ServiceName"]): entry["VpcEndpointType"] for entry in found}


def _service(name: object) -> str:
    text = name if isinstance(name, str) else "com.amazonaws.region" + name["Fn::Join"][1][-1]  # type: ignore[index]
    return text.split(".", 3)[3]


def test_a_closed_network_leads_to_what_is_called_and_to_nothing_else() -> None:
    network, *_ = made(ClosedNetwork(), *CALLS)
    assert led_to(network) == {service: "Gateway" if service == "s3" else "Interface" for service in CALLS.values()}
    quiet, *_ = made(ClosedNetwork())
    assert led_to(quiet) == {}


def test_a_network_with_a_way_out_pays_for_no_interface_and_keeps_artifacts_off_its_gateway() -> None:
    network, *_ = made(NatNetwork(kind="nat"), *CALLS)
    assert led_to(network) == {"s3": "Gateway"}


@pytest.mark.parametrize("service", sorted(CALLS.values()))
def test_without_any_one_of_its_endpoints_nothing_is_synthesised_and_the_caller_is_named(service: str) -> None:
    network, _, endpoints = made(ClosedNetwork(), *CALLS)
    assert endpoints.node.try_remove_child(service)
    with pytest.raises(RuntimeError, match=rf"demo-fleet/RoleDefaultPolicy\w+ needs the endpoint {service} "):
        network.node.root.synth()


def test_a_call_that_is_granted_after_the_endpoints_were_made_is_noticed() -> None:
    network, caller, _ = made(ClosedNetwork(), "s3:GetObject")
    role = caller.node.find_child("Role")
    role.add_to_principal_policy(aws_iam.PolicyStatement(actions=["sqs:SendMessage"], resources=["arn:aws:x:::y"]))
    with pytest.raises(RuntimeError, match=r"needs the endpoint sqs \(sqs:SendMessage\)"):
        network.node.root.synth()


def test_a_call_that_no_endpoint_leads_to_is_refused() -> None:
    with pytest.raises(Unreachable, match=r"^demo-fleet/RoleDefaultPolicy\w+ calls organizations"):
        made(ClosedNetwork(), "organizations:ListRoots")


def test_scripts_at_boot_are_callers_too() -> None:
    app = new_app()
    stack = NetworkStack(app, "demo-network", project="demo", network=ClosedNetwork(), zones=ZONES, env=HERE)
    caller = Stack(app, "demo-fleet", env=HERE)
    script = aws_ec2.UserData.custom("aws sns publish --message ready")
    aws_ec2.LaunchTemplate(caller, "Template", user_data=script)
    Endpoints(stack, "Endpoints", network=stack.handle, callers=[caller])
    assert led_to(stack) == {"sns": "Interface"}


def test_endpoints_are_deployed_follow_their_callers_and_go_with_the_network(aws: None) -> None:
    def there() -> set[str]:
        vpc_endpoints = boto3.client("ec2").describe_vpc_endpoints()["VpcEndpoints"]
        return {
            vpc_endpoint["ServiceName"].split(".", 3)[3]
            for vpc_endpoint in vpc_endpoints
            if vpc_endpoint["State"] != "deleted"
        }

    network, caller, _ = made(ClosedNetwork(), "s3:GetObject", "logs:PutLogEvents")
    deploy(network, caller)
    assert there() == {"s3", "logs"}
    network, caller, _ = made(ClosedNetwork(), "s3:GetObject", "sqs:SendMessage")
    deploy(network, caller)
    assert there() == {"s3", "sqs"}
    destroy(caller, network)
    assert there() == set()
