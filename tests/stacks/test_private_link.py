"""The endpoint service of a fleet: reached by the endpoints of its principals only, and no reason to restart it."""

import json
from pathlib import Path
from typing import Any, Final

import boto3
import pytest
from aws_cdk import App

from nxpipe.pipeline.config import ConfigInvalid
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.stacks.lint.costs import estimate
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.lint.template import Templates, read
from nxpipe.stacks.lint.validation import guard
from tests.localaws.census import census, inventory
from tests.localaws.moto_patches.refreshes import hosts_answer
from tests.stacks.fleet_world import CERTIFICATE, World, configured, read_only, world
from tests.stacks.linting import complaints
from tests.stacks.local import REGION, deploy, destroy, outputs, resources, template_of

PARTNER: Final = "arn:aws:iam::210987654321:root"
SERVER: Final = 'command = ["server"]'
LINK: Final = f'{SERVER}\nprivate_link = {{ principals = ["{PARTNER}"] }}'
SECURE: Final = f'{LINK}\ncertificate = "{CERTIFICATE}"'
_GROUP: Final = "AWS::EC2::SecurityGroup"
_BALANCER: Final = "AWS::ElasticLoadBalancingV2::LoadBalancer"


def balancer(made: World, kind: str) -> tuple[str, dict[str, Any]]:
    """Logical id and properties of the load balancer of a type."""
    (found,) = (entry for entry in made.of(_BALANCER).items() if entry[1]["Type"] == kind)
    return found


def group_of(properties: dict[str, Any]) -> dict[str, Any]:
    (group,) = properties["SecurityGroups"]
    assert isinstance(group, dict)
    return group


@pytest.mark.parametrize(("more", "port"), [(LINK, 80), (SECURE, 443)])
def test_nothing_but_endpoints_reaches_the_network_load_balancer_and_it_reaches_the_fleets_own_only(
    more: str, port: int
) -> None:
    made = read_only(more=more)
    own, front = (group_of(balancer(made, kind)[1]) for kind in ("network", "application"))
    groups = made.of(_GROUP)
    assert "SecurityGroupIngress" not in groups[own["Fn::GetAtt"][0]]
    ingress, egress = (list(made.of(f"{_GROUP}{way}").values()) for way in ("Ingress", "Egress"))
    assert [rule for rule in ingress if rule["GroupId"] == own] == []
    assert balancer(made, "network")[1]["EnforceSecurityGroupInboundRulesOnPrivateLinkTraffic"] == "off"

    def way(rule: dict[str, Any], peer: str) -> tuple[Any, str, int, int]:
        return rule[peer], rule["IpProtocol"], rule["FromPort"], rule["ToPort"]

    (out,) = (way(rule, "DestinationSecurityGroupId") for rule in egress if rule["GroupId"] == own)
    assert out == (front, "tcp", port, port)
    into = [way(rule, "SourceSecurityGroupId") for rule in ingress if rule["GroupId"] == front]
    assert into == [(own, "tcp", port, port)]


def test_the_fleets_load_balancer_is_registered_once_it_listens() -> None:
    made = read_only(more=SECURE)
    front, _ = balancer(made, "application")
    (targets,) = (
        entry
        for entry in made.template["Resources"].values()
        if entry["Type"].endswith("::TargetGroup") and entry["Properties"]["TargetType"] == "alb"
    )
    assert targets["Properties"]["Targets"] == [{"Id": {"Ref": front}, "Port": 443}]
    assert (targets["Properties"]["HealthCheckProtocol"], targets["Properties"]["HealthCheckPath"]) == (
        "HTTPS",
        "/health",
    )
    listeners = made.of("AWS::ElasticLoadBalancingV2::Listener").items()
    (listener,) = (id_ for id_, entry in listeners if entry["Protocol"] == "HTTPS")
    assert listener in targets["DependsOn"]


def test_an_endpoint_service_that_comes_restarts_no_instance() -> None:
    without, linked = (read_only(more=more).template["Resources"] for more in (SERVER, LINK))
    assert {id_: linked[id_] for id_ in without} == without


def test_the_rules_accept_it_and_its_price_is_unknown_not_zero() -> None:
    made = read_only(more=SECURE)
    templates = Templates(tuple(read(stack.stack_name, template_of(stack), REGION) for stack in made.stacks))
    assert [str(entry) for entry in lint(templates, Facts()) if "Link" in entry.resource.path] == []
    assert complaints(made.template, REGION) == []
    (line,) = (line for line in estimate(templates, load_prices()).lines if "Link" in line.resource.path)
    assert (line.resource.type, line.hourly) == (_BALANCER, None)


@pytest.mark.sample(2)
def test_the_packs_accept_it(tmp_path: Path) -> None:
    config = configured(tmp_path, more=SECURE)
    app = world(config, tmp_path).serve.node.root
    assert isinstance(app, App)
    guard(app, config, tmp_path)
    with pytest.raises(RuntimeError, match="ValidationFailed"):  # this project has no lock file
        app.synth()
    report = json.loads(Path(app.outdir, "validation-report.json").read_text())
    places = [
        (violation["ruleName"], at["constructPath"])
        for plugin in report["pluginReports"]
        for violation in plugin["violations"]
        for at in violation["violatingConstructs"]
    ]
    assert places
    assert [place for place in places if "/Front/Link/" in place[1]] == []


@pytest.mark.sample(4)
def test_a_fleet_gets_an_endpoint_service_and_loses_it_again(aws: None, tmp_path: Path) -> None:
    made = world(configured(tmp_path), tmp_path)
    with hosts_answer("CONTINUE"):
        deploy(*made.stacks)
        before = inventory(REGION)
        linked = world(configured(tmp_path, more=LINK), tmp_path)
        deploy(linked.serve)
        assert [str(entry) for entry in census(REGION)] == []
        ec2, elb = boto3.client("ec2"), boto3.client("elbv2")
        (id_,) = resources(linked.serve, "AWS::EC2::VPCEndpointService")
        (service,) = ec2.describe_vpc_endpoint_service_configurations(ServiceIds=[id_])["ServiceConfigurations"]
        assert (service["ServiceName"], service["AcceptanceRequired"]) == (outputs(linked.serve)["ServiceName"], True)
        allowed = ec2.describe_vpc_endpoint_service_permissions(ServiceId=id_)["AllowedPrincipals"]
        assert [entry["Principal"] for entry in allowed] == [PARTNER]
        there = elb.describe_load_balancers()["LoadBalancers"]
        balancers = {entry["Type"]: entry["LoadBalancerArn"] for entry in there}
        (listener,) = elb.describe_listeners(LoadBalancerArn=balancers["network"])["Listeners"]
        (action,) = listener["DefaultActions"]
        (target,) = elb.describe_target_health(TargetGroupArn=action["TargetGroupArn"])["TargetHealthDescriptions"]
        assert target["Target"]["Id"] == balancers["application"]

        other = PARTNER.replace("2", "3")
        changed = f'{SERVER}\nprivate_link = {{ principals = ["{other}"], acceptance = false }}'
        deploy(world(configured(tmp_path, more=changed), tmp_path).serve)
        (service,) = ec2.describe_vpc_endpoint_service_configurations(ServiceIds=[id_])["ServiceConfigurations"]
        allowed = ec2.describe_vpc_endpoint_service_permissions(ServiceId=id_)["AllowedPrincipals"]
        assert (service["AcceptanceRequired"], [entry["Principal"] for entry in allowed]) == (False, [other])
        assert [str(entry) for entry in census(REGION)] == []
        deploy(world(configured(tmp_path), tmp_path).serve)
        assert inventory(REGION) == before
        destroy(made.serve)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (f'{LINK}\nidle_timeout = "351s"', "PrivateLink drops idle connections"),
        (f'{SERVER}\nprivate_link = {{ principals = ["*"] }}', "the ARN of an account, a role or a user"),
        (f"{SERVER}\nprivate_link = {{ principals = [] }}", "principals"),
    ],
)
def test_a_link_that_would_be_open_or_cut_off_is_refused(more: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=says.replace("*", r"\*")):
        configured(tmp_path, more=more)
