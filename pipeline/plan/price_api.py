"""Prices from AWS's APIs: the price list for on demand and reserved instances, savings plans, the spot market, capacity
blocks. What a region does not sell, or an identity may not read, is left out with a message."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.util.aws import client, convert_sdk_errors
from nxpipe.pipeline.util.errors import AwsError

_HOME: Final = "us-east-1"  # of the price list and of savings plans, which answer for every region
_TERMS: Final = {"1yr": Purchase.RESERVED_1Y, "3yr": Purchase.RESERVED_3Y}
_YEAR: Final = 365 * 24 * 3600
_DURATIONS: Final = {_YEAR: Purchase.SAVINGS_PLAN_1Y, 3 * _YEAR: Purchase.SAVINGS_PLAN_3Y}
_BLOCK_HOURS: Final = 24
_SOURCES: Final = {
    Purchase.ON_DEMAND: "AWS's price list API",
    Purchase.RESERVED_1Y: "AWS's price list API: standard, no upfront payment",
    Purchase.RESERVED_3Y: "AWS's price list API: standard, no upfront payment",
    Purchase.SAVINGS_PLAN_1Y: "AWS's offers of EC2 Instance Savings Plans, no upfront payment",
    Purchase.SAVINGS_PLAN_3Y: "AWS's offers of EC2 Instance Savings Plans, no upfront payment",
    Purchase.SPOT: "AWS's spot market, the dearest zone",
    Purchase.CAPACITY_BLOCK: f"AWS's cheapest offer of one instance for {_BLOCK_HOURS} hours",
}

Found = Iterator[tuple[Purchase, str, float]]  # way of buying, instance type, dollars an hour


@dataclass
class FreshPrices:
    """Prices found, by way of buying, region and instance type; and why some were not found."""

    date: str
    found: dict[Purchase, dict[str, dict[str, float]]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(len(prices) for regions in self.found.values() for prices in regions.values())

    def add(self, purchase: Purchase, region: str, type_: str, hourly: float) -> None:
        self.found.setdefault(purchase, {}).setdefault(region, {})[type_] = hourly

    def toml(self) -> str:
        """A table in the form of prices.toml."""
        return "\n".join(_lines(self))


def _lines(fresh: FreshPrices) -> Iterator[str]:
    yield "# Prices in US dollars an hour, Linux, before taxes and discounts: written by `nxpipe prices refresh`."
    for purchase, regions in sorted(fresh.found.items()):
        yield f'\n[{purchase}]\nsource = "{_SOURCES[purchase]}"\ndate = {fresh.date}\npurchase = "{purchase}"'
        for region, prices in sorted(regions.items()):
            yield f"\n[{purchase}.{region}]"
            yield from (f'"{type_}" = {hourly!r}' for type_, hourly in sorted(prices.items()))
    yield ""


def ask(regions: Sequence[str], types: Sequence[str], progress: Callable[[str], None]) -> FreshPrices:
    """Today's prices of instance types; AwsError if there is none at all."""
    fresh = FreshPrices(datetime.now(UTC).date().isoformat())
    for region in regions:
        for what, source in (
            ("on demand and reserved", _listed(region, types)),
            ("with savings plans", _planned(region, types)),
            ("on the spot market", _spot(region, types)),
            ("of capacity blocks", _blocks(region, types)),
        ):
            progress(f"prices {what} in {region}")
            try:
                for purchase, type_, hourly in source:
                    fresh.add(purchase, region, type_, hourly)
            except AwsError as fault:
                fresh.faults.append(f"no prices {what} in {region}: {fault}")
    if not fresh.count:
        raise AwsError("; ".join(fresh.faults) or f"AWS sells none of {', '.join(types)} in {', '.join(regions)}")
    return fresh


def _listed(region: str, types: Iterable[str]) -> Found:
    pricing = client("pricing", _HOME)
    for type_ in types:
        wanted = {
            "instanceType": type_,
            "regionCode": region,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
        }
        filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in wanted.items()]
        with convert_sdk_errors("read the price list"):
            pages = pricing.get_paginator("get_products").paginate(ServiceCode="AmazonEC2", Filters=filters)
            products = [json.loads(product) for page in pages for product in page["PriceList"]]
        for product in products:
            terms = product.get("terms", {})
            for term in terms.get("OnDemand", {}).values():
                yield from ((Purchase.ON_DEMAND, type_, hourly) for hourly in _hourly(term))
            for term in terms.get("Reserved", {}).values():
                attributes = term.get("termAttributes", {})
                usual = attributes.get("PurchaseOption"), attributes.get("OfferingClass")
                length = _TERMS.get(attributes.get("LeaseContractLength", ""))
                if length and usual == ("No Upfront", "standard"):
                    yield from ((length, type_, hourly) for hourly in _hourly(term))


def _hourly(term: Mapping[str, Any]) -> Iterator[float]:
    """The positive hourly rate of a term; reservations at other places have rates of zero."""
    for dimension in term.get("priceDimensions", {}).values():
        dollars = float(dimension.get("pricePerUnit", {}).get("USD", 0))
        if dimension.get("unit") == "Hrs" and dollars > 0:
            yield dollars


def _planned(region: str, types: Sequence[str]) -> Found:
    plans = client("savingsplans", _HOME)
    wanted = {
        "region": [region],
        "instanceType": list(types),
        "tenancy": ["shared"],
        "productDescription": ["Linux/UNIX"],
    }
    request: dict[str, Any] = {
        "savingsPlanTypes": ["EC2Instance"],
        "savingsPlanPaymentOptions": ["No Upfront"],
        "products": ["EC2"],
        "serviceCodes": ["AmazonEC2"],
        "filters": [{"name": name, "values": values} for name, values in wanted.items()],
    }
    while True:
        with convert_sdk_errors("read the offers of savings plans"):
            page = plans.describe_savings_plans_offering_rates(**request)
        for rate in page["searchResults"]:
            own = {each["name"]: each["value"] for each in rate.get("properties", [])}
            duration = _DURATIONS.get(rate["savingsPlanOffering"]["durationSeconds"])
            if duration and own.get("instanceType") in types and float(rate["rate"]) > 0:
                yield duration, own["instanceType"], float(rate["rate"])
        if not page.get("nextToken"):
            return
        request["nextToken"] = page["nextToken"]


def _spot(region: str, types: Sequence[str]) -> Found:
    ec2 = client("ec2", region)
    highest: dict[str, float] = {}
    with convert_sdk_errors("read the prices of the spot market"):
        pages = ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(types), ProductDescriptions=["Linux/UNIX"], StartTime=datetime.now(UTC)
        )
        for page in pages:
            for entry in page["SpotPriceHistory"]:
                price = float(entry["SpotPrice"])
                highest[entry["InstanceType"]] = max(price, highest.get(entry["InstanceType"], 0))
    yield from ((Purchase.SPOT, type_, price) for type_, price in highest.items())


def _blocks(region: str, types: Sequence[str]) -> Found:
    ec2 = client("ec2", region)
    for type_ in types:
        try:
            with convert_sdk_errors("read the offers of capacity blocks"):
                offers = ec2.describe_capacity_block_offerings(
                    InstanceType=type_, InstanceCount=1, CapacityDurationHours=_BLOCK_HOURS
                )["CapacityBlockOfferings"]
        except AwsError as fault:
            if "InvalidParameter" in str(fault) or "Unsupported" in str(fault):
                continue  # AWS sells no capacity blocks of this type here
            raise
        fees = [float(offer["UpfrontFee"]) / offer["CapacityBlockDurationHours"] for offer in offers]
        if fees:
            yield Purchase.CAPACITY_BLOCK, type_, min(fees)
