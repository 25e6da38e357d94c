"""Hourly cost of templates: instances at their desired capacity, and network resources billed by the hour.

An estimate: requests, bytes and storage depend on use and are left out. Resources without a known price are listed, not
guessed.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.stacks.lint.launches import (
    BATCH,
    GROUP,
    INSTANCE,
    NODES,
    Launch,
    compute,
    instance_types,
    launches,
    size_of,
)
from nxpipe.stacks.lint.template import Resource, Templates, listed, tables

HOURS_A_MONTH: Final = 730

_NAT: Final = "AWS::EC2::NatGateway"
_ENDPOINT: Final = "AWS::EC2::VPCEndpoint"
_HOSTED: Final = "AWS::SageMaker::Endpoint"
_CLUSTER: Final = "AWS::EKS::Cluster"
_BILLED_BY_USE_TOO: Final = (
    "AWS::ElasticLoadBalancingV2::LoadBalancer",
    "AWS::FSx::FileSystem",
)


@dataclass(frozen=True)
class Prices:
    """US dollars an hour, by region and by instance type or type of resource."""

    known: Mapping[str, Mapping[str, float]]
    date: date  # of the oldest

    def of(self, region: str | None, what: str) -> float | None:
        return self.known.get(region or "", {}).get(what)

    def dearest(self, region: str | None, types: Iterable[str]) -> float | None:
        """Of instance types that one may get any of; none where a price of them is not known."""
        found = [self.of(region, each) for each in types]
        known = [price for price in found if price is not None]
        return max(known) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class Line:
    """What one resource costs an hour; None when its price is not known, or was paid already."""

    resource: Resource
    what: str
    hourly: float | None
    remark: str = ""
    at_most: bool = False  # spot instances and mixed groups, by the price on demand of the dearest type

    def __str__(self) -> str:
        return f"{self.what} ({self.resource.path}){', at most' if self.at_most else ''}{self.remark}"


@dataclass(frozen=True)
class Estimate:
    lines: tuple[Line, ...]
    prices: Prices

    @cached_property
    def hourly(self) -> float:
        return sum(line.hourly or 0.0 for line in self.lines)

    @property
    def monthly(self) -> float:
        return self.hourly * HOURS_A_MONTH

    def __str__(self) -> str:
        """For a person: the dearest first, then what is not in the sum."""
        priced = sorted((line for line in self.lines if line.hourly), key=lambda line: -(line.hourly or 0))
        told = [f"  {_dollars(line.hourly or 0, 4)} {line}" for line in priced]
        silent: dict[tuple[str, str], list[str]] = {}
        for line in self.lines:
            if line.hourly is None:
                silent.setdefault((line.what, line.remark), []).append(line.resource.path)
        left_out = [f"  not in it: {what} ({_places(paths)}){remark}" for (what, remark), paths in silent.items()]
        head = f"{self._about(bool(silent))} {_dollars(self.hourly)} an hour, {_dollars(self.monthly, 0)} a month"
        return "\n".join([f"{head}, by list prices of {self.prices.date}:", *told, *left_out])

    def _about(self, silent: bool) -> str:
        """What is left out makes it more, what was bought as spot makes it less; both together, who knows."""
        at_most = any(line.at_most for line in self.lines)
        return {(True, False): "At least", (False, True): "At most"}.get((silent, at_most), "About")


def load_prices() -> Prices:
    lists = tomllib.loads(Path(__file__).with_name("prices.toml").read_text())
    known: dict[str, dict[str, float]] = {}
    for table in lists.values():
        for region, prices in table.items():
            if isinstance(prices, dict):
                known.setdefault(region, {}).update(prices)
    return Prices(known, min(table["date"] for table in lists.values()))


def estimate(templates: Templates, prices: Prices) -> Estimate:
    lines = [
        *_of_instances(templates, prices),
        *_of_endpoints(templates, prices),
        *_of_what_is_always_there(templates, prices),
    ]
    for resource in templates.of(*_BILLED_BY_USE_TOO):
        lines.append(Line(resource, resource.type, None, ": no price known"))
    return Estimate(tuple(lines), prices)


def _of_instances(templates: Templates, prices: Prices) -> Iterator[Line]:
    launched_by = {user.key: launch for launch in launches(templates) for user in launch.users}
    for group in templates.of(GROUP):
        launch = launched_by.get(group.key)
        count = _number(size_of(group))
        spot = "MixedInstancesPolicy" in group.properties or (launch is not None and _market(launch) == "spot")
        yield from _instances(group, launch, count, prices, at_most=spot)
    for nodes in templates.of(NODES):
        spot = nodes.properties.get("CapacityType") == "SPOT"
        count = _number(size_of(nodes))
        yield from _instances(nodes, launched_by.get(nodes.key), count, prices, at_most=spot)
    for environment in templates.of(BATCH):
        yield from _jobs(environment, launched_by.get(environment.key), prices)
    for launch in launches(templates):
        if launch.resource.type == INSTANCE:
            yield from _instances(launch.resource, launch, 1, prices)


def _instances(
    at: Resource,
    launch: Launch | None,
    count: int | None,
    prices: Prices,
    remark: str = "",
    *,
    at_most: bool = False,
) -> Iterator[Line]:
    """The dearest type of those that a group may choose from: no estimate should flatter."""
    types = tuple(instance_types(at)) or (launch.types if launch is not None else ())
    if launch is not None and launch.block:
        yield Line(at, f"a capacity block of {', '.join(types)}", None, ": paid when it was bought")
        return
    if count == 0:
        return
    if not types:
        yield Line(at, "instances", None, ": of a type that only the deployment knows")
        return
    for unknown in [each for each in types if prices.of(at.region, each) is None]:
        yield Line(at, unknown, None, f": no price known in {_where(at)}")
    known = [(price, each) for each in types if (price := prices.of(at.region, each)) is not None]
    if known:
        price, dearest = max(known)
        if count is None:
            yield Line(at, dearest, None, ": in a number that only the deployment knows")
        else:
            yield Line(at, f"{count} × {dearest}", count * price, remark, at_most)


def _jobs(environment: Resource, launch: Launch | None, prices: Prices) -> Iterator[Line]:
    """Batch counts virtual processors, and starts instances for jobs: what it costs when it is full."""
    types, most = instance_types(environment), _number(compute(environment).get("MaxvCpus"))
    vcpus = [INSTANCES[each].vcpus for each in types if each in INSTANCES]
    if len(vcpus) < len(types) or not types:
        yield Line(environment, "Batch", None, f": of {', '.join(types) or 'types'} that Batch chooses, while jobs run")
        return
    count = None if most is None else most // min(vcpus)
    spot = str(compute(environment).get("Type")).upper() == "SPOT"
    yield from _instances(environment, launch, count, prices, ", while jobs run", at_most=spot)


def _of_endpoints(templates: Templates, prices: Prices) -> Iterator[Line]:
    """SageMaker has prices of its own, for instances that it calls ml.*."""
    for endpoint in templates.of(_HOSTED):
        config = templates.follow(endpoint.properties.get("EndpointConfigName"), endpoint)
        variants = tables(config.properties, "ProductionVariants") if config is not None else []
        if not variants:
            yield Line(endpoint, "instances", None, ": of a type that only the deployment knows")
        for variant in variants:
            count, type_ = _number(variant.get("InitialInstanceCount")), str(variant.get("InstanceType"))
            price = prices.of(endpoint.region, type_)
            if price is None or count is None:
                yield Line(endpoint, f"{count or 'some'} × {type_}", None, f": no price known in {_where(endpoint)}")
            else:
                yield Line(endpoint, f"{count} × {type_}", count * price)


def _of_what_is_always_there(templates: Templates, prices: Prices) -> Iterator[Line]:
    for gateway in templates.of(_NAT):
        yield _line(gateway, "NAT gateway", 1, prices)
    for endpoint in templates.of(_ENDPOINT):
        if endpoint.properties.get("VpcEndpointType") == "Interface":
            yield _line(endpoint, "endpoint", max(1, len(listed(endpoint.properties.get("SubnetIds")))), prices)
    for cluster in templates.of(_CLUSTER):
        yield _line(cluster, "control plane of EKS", 1, prices)


def _line(resource: Resource, what: str, count: int, prices: Prices) -> Line:
    price = prices.of(resource.region, resource.type)
    if price is None:
        return Line(resource, what, None, f": no price known in {_where(resource)}")
    return Line(resource, f"{count} × {what}", count * price)


def _where(at: Resource) -> str:
    return at.region or "a region that only the deployment knows"


def _market(launch: Launch) -> object:
    options = launch.data.get("InstanceMarketOptions")
    return options.get("MarketType") if isinstance(options, Mapping) else None


def _number(value: object) -> int | None:
    return int(str(value)) if str(value).isdigit() else None


def _places(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _dollars(amount: float, digits: int = 2) -> str:
    return f"${amount:,.{digits}f}"
