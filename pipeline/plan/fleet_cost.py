"""What a deployed fleet costs for a million tokens: the metrics of its instances in CloudWatch, and prices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from nxpipe.pipeline.config.device_measures import (
    GENERATED_TOKENS,
    INSTANCE_SECONDS,
    INSTANCE_TYPE,
    NAMESPACE,
    PROMPT_TOKENS,
)
from nxpipe.pipeline.config.prices import Price, Prices, Purchase
from nxpipe.pipeline.config.serving_fleet import ServingFleet
from nxpipe.pipeline.util.aws import client, convert_sdk_errors

_PERIOD: Final = 3600  # seconds of a datum; CloudWatch keeps hours for 15 months
_BOUGHT: Final = {
    "on-demand": Purchase.ON_DEMAND,
    "spot": Purchase.SPOT,
    "reservation": Purchase.ON_DEMAND,  # a capacity reservation is billed as on demand
    "capacity-block": Purchase.CAPACITY_BLOCK,
}


@dataclass(frozen=True)
class TypeCost:
    """Hours of instances of one type; without a price of its way of buying, that on demand is an upper bound."""

    type: str
    hours: float
    purchase: Purchase
    price: Price | None

    @property
    def dollars(self) -> float | None:
        return None if self.price is None else self.hours * self.price.hourly


@dataclass(frozen=True)
class FleetCost:
    start: datetime
    stop: datetime
    types: tuple[TypeCost, ...]
    generated: float
    prompts: float

    @property
    def dollars(self) -> float | None:
        """None if the price of an instance type that ran is not known."""
        costs = [each.dollars for each in self.types]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    def per_million(self, tokens: float) -> float | None:
        return self.dollars / tokens * 1e6 if tokens and self.dollars is not None else None


def measured_cost(
    project: str, fleet: ServingFleet, region: str | None, hours: int, prices: Prices, purchase: Purchase | None
) -> FleetCost:
    """The cost of the last whole hours, by what the fleet's instances reported."""
    stop = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    start = stop - timedelta(hours=hours)
    cloudwatch = client("cloudwatch", region)
    own = {"Project": project, "Fleet": fleet.name}
    wanted = [(GENERATED_TOKENS, own), (PROMPT_TOKENS, own)]
    wanted += [(INSTANCE_SECONDS, own | {INSTANCE_TYPE: type_}) for type_ in fleet.instance_types]
    generated, prompts, *seconds = _sums(cloudwatch, wanted, start, stop)
    place = str(cloudwatch.meta.region_name)
    types = [
        _priced(type_, ran / 3600, place, prices, purchase or _BOUGHT[fleet.capacity.kind])
        for type_, ran in zip(fleet.instance_types, seconds, strict=True)
        if ran
    ]
    return FleetCost(start, stop, tuple(types), generated, prompts)


def _priced(type_: str, hours: float, region: str, prices: Prices, purchase: Purchase) -> TypeCost:
    for way in (purchase, Purchase.ON_DEMAND):
        if (price := prices.price(region, type_, way)) is not None:
            return TypeCost(type_, hours, way, price)
    return TypeCost(type_, hours, purchase, None)


def _sums(
    cloudwatch: Any, wanted: Sequence[tuple[str, Mapping[str, str]]], start: datetime, stop: datetime
) -> list[float]:
    """The sum of each metric over a span of time."""
    queries = [
        {
            "Id": f"q{number}",
            "MetricStat": {
                "Metric": {
                    "Namespace": NAMESPACE,
                    "MetricName": name,
                    "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
                },
                "Period": _PERIOD,
                "Stat": "Sum",
            },
        }
        for number, (name, dimensions) in enumerate(wanted)
    ]
    sums = dict.fromkeys((query["Id"] for query in queries), 0.0)
    with convert_sdk_errors("read the metrics of the fleet"):
        pages = cloudwatch.get_paginator("get_metric_data").paginate(
            MetricDataQueries=queries, StartTime=start, EndTime=stop
        )
        for page in pages:
            for result in page["MetricDataResults"]:
                sums[result["Id"]] += sum(result["Values"])
    return list(sums.values())
