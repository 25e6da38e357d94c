"""A cost estimate: its sum, the parts that it excludes, and the comparison with the budget."""

import tomllib
from typing import Any

import pytest

from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Prices, load_prices
from nxpipe.stacks.lint.costs import Estimate, estimate
from nxpipe.stacks.lint.finding import Facts
from nxpipe.stacks.lint.launches import MINIMUM
from nxpipe.stacks.lint.rules import lint
from nxpipe.stacks.lint.template import Templates, read
from tests.conftest import ROOT
from tests.stacks.rules.fixtures import environment, group, launch, resource

PRICES = load_prices()
REGION = "us-east-1"


def known(what: str) -> float:
    found = PRICES.of(REGION, what)
    assert found is not None
    return found


INF2 = known("inf2.xlarge")
TRN1 = known("trn1.32xlarge")


def templates(resources: dict[str, Any], region: str | None = REGION) -> Templates:
    return Templates((read("demo", {"Resources": resources}, region),))


def estimated(resources: dict[str, Any], region: str | None = REGION) -> Estimate:
    return estimate(templates(resources, region), PRICES)


SERVING = {"Launch": launch(InstanceType="inf2.xlarge"), "Nodes": group(DesiredCapacity="3")}


def test_a_group_costs_its_desired_instances() -> None:
    found = estimated(SERVING)
    assert found.hourly == pytest.approx(3 * INF2)
    assert found.monthly == pytest.approx(3 * INF2 * HOURS_A_MONTH)
    assert "3 × inf2.xlarge" in str(found)


@pytest.mark.parametrize(("scaling", "count"), [({"DesiredSize": 2}, 2), ({"MinSize": 3}, 3), ({}, 1)])
def test_a_node_group_costs_its_desired_nodes_and_its_cluster_an_hourly_fee(
    scaling: dict[str, int], count: int
) -> None:
    nodes = resource("AWS::EKS::Nodegroup", LaunchTemplate={"Id": {"Ref": "Launch"}}, ScalingConfig=scaling)
    found = estimated({"Launch": SERVING["Launch"], "Nodes": nodes, "Cluster": resource("AWS::EKS::Cluster")})
    assert found.hourly == pytest.approx(count * INF2 + known("AWS::EKS::Cluster"))
    nodes["Properties"]["CapacityType"] = "SPOT"
    assert ", at most" in str(estimated({"Launch": SERVING["Launch"], "Nodes": nodes}))


def test_a_group_that_scales_costs_from_its_minimum_to_its_maximum() -> None:
    tracking = resource("AWS::AutoScaling::ScalingPolicy", AutoScalingGroupName={"Ref": "Nodes"})
    nodes = group(DesiredCapacity="3", MinSize="0", MaxSize="5")
    found = estimated({**SERVING, "Nodes": nodes, "Tracking": {**tracking, "Metadata": {MINIMUM: 2}}})
    assert found.hourly == pytest.approx(3 * INF2)
    assert found.scaled == pytest.approx((2 * INF2 * HOURS_A_MONTH, 5 * INF2 * HOURS_A_MONTH))
    assert "3 × inf2.xlarge (demo/Nodes), 2 to 5 by load" in str(found)
    assert "$1,660 a month; $1,107 to $2,767 a month with target tracking, by list prices" in str(found)
    assert estimated(SERVING).range == ""


def test_an_empty_group_costs_nothing_and_is_not_told() -> None:
    found = estimated({**SERVING, "Nodes": group(DesiredCapacity="0")})
    assert found.lines == ()


def test_a_group_of_several_types_costs_the_dearest_of_them() -> None:
    overrides = [{"InstanceType": "inf2.xlarge"}, {"InstanceType": "inf2.8xlarge"}]
    specification = {"LaunchTemplateId": {"Ref": "Launch"}, "Version": "1"}
    mixed = {"LaunchTemplate": {"LaunchTemplateSpecification": specification, "Overrides": overrides}}
    nodes = group(MixedInstancesPolicy=mixed, DesiredCapacity="2")
    del nodes["Properties"]["LaunchTemplate"]
    found = estimated({"Launch": launch(InstanceType="inf2.xlarge"), "Nodes": nodes})
    assert found.hourly == pytest.approx(2 * known("inf2.8xlarge"))
    assert str(found).startswith("At most")
    assert "2 × inf2.8xlarge (demo/Nodes), at most" in str(found)


SPOT_NODES = {
    "Launch": launch(InstanceType="inf2.xlarge", InstanceMarketOptions={"MarketType": "spot"}),
    "Nodes": group(DesiredCapacity="3"),
}


def test_spot_instances_cost_at_most_what_they_would_on_demand() -> None:
    assert estimated(SPOT_NODES).hourly == pytest.approx(3 * INF2)
    assert str(estimated(SPOT_NODES)).startswith("At most $2.27 an hour")
    jobs = environment(Type="SPOT", InstanceTypes=["trn1.32xlarge"], MaxvCpus=256)
    found = str(estimated({"Launch": launch(), "Jobs": jobs}))
    assert found.startswith("At most")
    assert "2 × trn1.32xlarge (demo/Jobs), at most, while jobs run" in found


def test_an_estimate_that_may_be_more_and_may_be_less_says_neither() -> None:
    unknown = {"Disk": resource("AWS::FSx::FileSystem")}
    assert str(estimated({**SPOT_NODES, **unknown})).startswith("About")


def test_a_training_environment_costs_what_it_holds_when_it_is_full() -> None:
    found = estimated({"Launch": launch(), "Jobs": environment(InstanceTypes=["trn1.32xlarge"], MaxvCpus=256)})
    assert found.hourly == pytest.approx(2 * TRN1)
    assert "while jobs run" in str(found)


def test_a_capacity_block_is_paid_already() -> None:
    block = launch(InstanceType="trn1.32xlarge", InstanceMarketOptions={"MarketType": "capacity-block"})
    found = estimated({"Launch": block, "Nodes": group(DesiredCapacity="4")})
    assert found.hourly == 0
    assert "paid at purchase" in str(found)


@pytest.mark.parametrize(
    ("resources", "region", "said"),
    [
        (SERVING, "eu-west-9", "inf2.xlarge (demo/Nodes): no price known in eu-west-9"),
        (SERVING, None, "a region known at deployment only"),
        ({**SERVING, "Launch": launch(InstanceType="trn2.48xlarge")}, REGION, "trn2.48xlarge (demo/Nodes): no price"),
        ({**SERVING, "Nodes": group(DesiredCapacity={"Ref": "Count"})}, REGION, "in a number known at deployment only"),
        ({**SERVING, "Launch": launch()}, REGION, "of a type known at deployment only"),
        ({"Farm": environment(InstanceTypes=["c7i"], MaxvCpus=256)}, REGION, "c7i that Batch chooses"),
        ({"Scratch": resource("AWS::FSx::FileSystem")}, REGION, "AWS::FSx::FileSystem (demo/Scratch): no price known"),
        (
            {"Cluster": resource("AWS::EKS::Cluster")},
            "eu-west-9",
            "control plane of EKS (demo/Cluster): no price known",
        ),
    ],
)
def test_what_is_not_known_is_said_and_not_guessed(resources: dict[str, Any], region: str | None, said: str) -> None:
    found = estimated(resources, region)
    assert found.hourly == 0
    assert said in str(found)


def test_endpoints_cost_by_subnet_and_those_by_routes_nothing() -> None:
    interface = resource("AWS::EC2::VPCEndpoint", VpcEndpointType="Interface", SubnetIds=["subnet-1", "subnet-2"])
    gateway = resource("AWS::EC2::VPCEndpoint", VpcEndpointType="Gateway")
    found = estimated({"Kms": interface, "S3": gateway, "Nat": resource("AWS::EC2::NatGateway")})
    assert found.hourly == pytest.approx(2 * known("AWS::EC2::VPCEndpoint") + known("AWS::EC2::NatGateway"))


def over(budget: int | None, prices: Prices | None = PRICES, resources: dict[str, Any] | None = None) -> list[str]:
    found = lint(templates(resources or SERVING), Facts(budget=budget, prices=prices))
    return [str(entry) for entry in found if entry.rule == "NXP-COST-1"]


def test_what_is_over_the_budget_is_found_with_both_figures_and_the_dearest() -> None:
    monthly = 3 * INF2 * HOURS_A_MONTH
    assert over(int(monthly) + 1) == []
    (said,) = over(int(monthly))
    for words in (f"about ${monthly:,.0f}", f"the budget is ${int(monthly):,}", "3 × inf2.xlarge", "demo/Nodes"):
        assert words in said


def test_a_budget_is_not_kept_by_what_has_no_known_price() -> None:
    unknown = {**SERVING, "Launch": launch(InstanceType="trn2.48xlarge")}
    (said,) = over(1_000_000, resources=unknown)
    for words in ("demo/Nodes", "the cost of trn2.48xlarge is not known in us-east-1", "the budget of $1,000,000"):
        assert words in said
    assert over(None, resources=unknown) == []
    block = launch(InstanceType="trn2.48xlarge", InstanceMarketOptions={"MarketType": "capacity-block"})
    assert over(1_000_000, resources={**SERVING, "Launch": block}) == []  # paid at purchase
    balancer = resource("AWS::ElasticLoadBalancingV2::LoadBalancer")
    assert over(1_000_000, resources={**SERVING, "Front": balancer}) == []


def test_without_a_budget_nothing_is_over_it() -> None:
    assert over(None) == over(1, None) == []


def test_an_estimate_that_leaves_something_out_says_that_it_is_the_least() -> None:
    systems = {name: resource("AWS::FSx::FileSystem") for name in ("One", "Two", "Three")}
    assert str(estimated(SERVING)).startswith("About $2.27 an hour, $1,660 a month")
    result = str(estimated({**SERVING, **systems}))
    assert result.startswith("At least $2.27 an hour")
    assert "AWS::FSx::FileSystem (demo/One and 2 more): no price known" in result


def test_the_price_of_an_instance_is_known_where_it_is_sold() -> None:
    for region in ("us-east-2", "us-west-2"):
        for name in ("inf2.xlarge", "inf2.48xlarge", "trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge"):
            assert PRICES.of(region, name) == PRICES.of("us-east-1", name)
    assert PRICES.of("eu-west-1", "inf2.xlarge") == 0.94775
    assert PRICES.of("eu-west-1", "trn1.32xlarge") is None


def test_every_price_has_a_source_and_a_date() -> None:
    tables = tomllib.loads((ROOT / "pipeline" / "config" / "prices.toml").read_text())
    for table in tables.values():
        assert table["source"]
        assert "purchase" in table or table["date"] >= PRICES.date
