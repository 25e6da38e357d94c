"""Prices: what the shipped table says, what AWS answers, and what is said when it does not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import ANY, Stubber

from nxpipe.pipeline.config.prices import OWN_TABLE, Purchase, load_prices
from nxpipe.pipeline.plan import price_api
from nxpipe.pipeline.util.errors import AwsError, InputInvalid
from tests.agent.project import CONFIG
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

TYPE = "inf2.xlarge"


def product(on_demand: str, reserved: str) -> str:
    """A product of AWS's price list, as its API spells it."""

    def term(dollars: str, **attributes: str) -> dict[str, Any]:
        hours = {"unit": "Hrs", "pricePerUnit": {"USD": dollars}}
        upfront = {"unit": "Quantity", "pricePerUnit": {"USD": "100"}}
        return {"priceDimensions": {"a": hours, "b": upfront}, "termAttributes": attributes}

    usual = {"LeaseContractLength": "3yr", "PurchaseOption": "No Upfront", "OfferingClass": "standard"}
    terms = {
        "OnDemand": {"x": term(on_demand)},
        "Reserved": {
            "y": term(reserved, **usual),
            "z": term("0.01", **{**usual, "PurchaseOption": "All Upfront"}),
        },
    }
    return json.dumps({"product": {"attributes": {"instanceType": TYPE}}, "terms": terms})


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Stubber]]:
    """Clients whose requests are checked against AWS's service models, with answers that a test adds."""
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    clients = {name: boto3.client(name, **keys) for name in ("pricing", "savingsplans", "ec2")}
    stubs = {name: Stubber(each) for name, each in clients.items()}
    monkeypatch.setattr(price_api, "client", lambda service, region: clients[service])
    for stub in stubs.values():
        stub.activate()
    yield stubs
    for stub in stubs.values():
        stub.assert_no_pending_responses()


def answers(aws: dict[str, Stubber]) -> None:
    aws["pricing"].add_response("get_products", {"PriceList": [product("0.7582", "0.33")]})
    rate = {
        "savingsPlanOffering": {"durationSeconds": 31_536_000},
        "rate": "0.48",
        "properties": [{"name": "instanceType", "value": TYPE}],
    }
    aws["savingsplans"].add_response("describe_savings_plans_offering_rates", {"searchResults": [rate]})
    zones = [{"InstanceType": TYPE, "SpotPrice": price} for price in ("0.2500", "0.3100")]
    aws["ec2"].add_response("describe_spot_price_history", {"SpotPriceHistory": zones}, ANY_PARAMETERS)
    aws["ec2"].add_client_error("describe_capacity_block_offerings", "InvalidParameterValue", "not sold")


ANY_PARAMETERS = {"InstanceTypes": [TYPE], "ProductDescriptions": ["Linux/UNIX"], "StartTime": ANY}


def test_each_way_of_buying_is_asked_of_the_service_that_knows_it(aws: dict[str, Stubber]) -> None:
    answers(aws)
    fresh = price_api.ask(["us-east-1"], [TYPE], lambda _: None)
    assert {purchase: places["us-east-1"][TYPE] for purchase, places in fresh.found.items()} == {
        Purchase.ON_DEMAND: 0.7582,
        Purchase.RESERVED_3Y: 0.33,
        Purchase.SAVINGS_PLAN_1Y: 0.48,
        Purchase.SPOT: 0.31,  # of the dearest zone
    }
    assert fresh.faults == []


def test_a_refused_question_costs_only_its_own_prices_and_is_said(aws: dict[str, Stubber]) -> None:
    aws["pricing"].add_client_error("get_products", "AccessDeniedException", "no pricing:GetProducts")
    aws["savingsplans"].add_response("describe_savings_plans_offering_rates", {"searchResults": []})
    zones = [{"InstanceType": TYPE, "SpotPrice": "0.3"}]
    aws["ec2"].add_response("describe_spot_price_history", {"SpotPriceHistory": zones})
    aws["ec2"].add_response("describe_capacity_block_offerings", {"CapacityBlockOfferings": []})
    fresh = price_api.ask(["us-east-1"], [TYPE], lambda _: None)
    assert set(fresh.found) == {Purchase.SPOT}
    (fault,) = fresh.faults
    assert "no prices on demand and reserved in us-east-1" in fault
    assert "pricing:GetProducts" in fault


def test_no_price_at_all_is_an_error_and_writes_nothing(aws: dict[str, Stubber]) -> None:
    for service, operation in (
        ("pricing", "get_products"),
        ("savingsplans", "describe_savings_plans_offering_rates"),
        ("ec2", "describe_spot_price_history"),
        ("ec2", "describe_capacity_block_offerings"),
    ):
        aws[service].add_client_error(operation, "UnauthorizedOperation", "no")
    with pytest.raises(AwsError, match="no prices on demand"):
        price_api.ask(["us-east-1"], [TYPE], lambda _: None)


def test_refreshed_prices_come_before_the_shipped_ones(
    nxpipe: InProcess, aws: dict[str, Stubber], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(aws)
    file = tmp_path / "prices.toml"
    answer = nxpipe("prices", "refresh", "--instance-type", TYPE, "--out", str(file))
    assert answer.code == 0, answer.err
    assert "set NXPIPE_PRICES=" in answer.err
    shipped = load_prices()
    monkeypatch.setenv(OWN_TABLE, str(file))
    load_prices.cache_clear()
    try:
        own = load_prices()
        spot = own.price("us-east-1", TYPE, Purchase.SPOT)
        assert spot is not None
        assert (spot.hourly, spot.source) == (0.31, "AWS's spot market, the dearest zone")
        assert own.of("us-east-1", "trn1.32xlarge") == shipped.of("us-east-1", "trn1.32xlarge")
        assert load_prices(file).of("us-east-1", "trn1.32xlarge") is None
    finally:
        load_prices.cache_clear()


def test_a_table_that_is_none_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    for text in (
        "nonsense",
        '[a]\nsource = "x"\n',
        '[a]\nsource = "x"\ndate = 2026-01-01\n[a.us-east-1]\n"inf2.xlarge" = -1\n',
        '[a]\nsource = "x"\ndate = 2026-01-01\n[a.us-east-1]\n"inf2.xlarge" = "dear"\n',
        '[a]\nsource = "x"\ndate = 2026-01-01\npurchase = "gift"\n',
        '[a]\nsource = "x"\ndate = "yesterday"\n[a.us-east-1]\n"inf2.xlarge" = 1\n',
    ):
        file.write_text(text)
        load_prices.cache_clear()
        with pytest.raises(InputInvalid, match="no table of prices"):
            load_prices(file)


def test_prices_are_listed_with_their_dates_and_an_unknown_name_gets_a_suggestion(nxpipe: InProcess) -> None:
    listed = nxpipe("prices", "ls", TYPE, "--region", "us-east-1")
    assert "0.7582" in listed.out
    assert "2026-07-20" in listed.out
    sources = nxpipe("prices", "ls", "trn2.48xlarge", "--purchase", "spot", "--sources")
    assert "a price is no capacity" in sources.out
    for wrong in (["inf2.xlrge"], ["--region", "us-est-1"]):
        refused = nxpipe("prices", "ls", *wrong)
        assert refused.code == 2
        assert "did you mean" in refused.err


@pytest.mark.parametrize(("region", "priced"), [("us-east-1", True), ("af-south-1", False)])
def test_a_rollout_states_what_its_second_set_of_instances_costs_and_when_the_price_was_read(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, region: str, *, priced: bool
) -> None:
    (tmp_path / "nxpipe.toml").write_text(CONFIG.replace('name = "demo"', f'name = "demo"\nregion = "{region}"'))
    monkeypatch.chdir(tmp_path)
    words = ("rollout", "plan", "--rps", "5", "--base-error", "0.005")
    (cost,) = json.loads(nxpipe(*words, "--json").out)["cost"]
    price = load_prices().price(region, TYPE)
    page = nxpipe(*words).out
    if priced:
        assert price is not None
        assert cost["dollars"] == pytest.approx(cost["instances"] * price.hourly * cost["minutes"] / 60)
        assert f"prices of {price.date}" in page
    else:
        assert (price, cost["dollars"]) == (None, None)
        assert "no price on demand is known in af-south-1" in page
