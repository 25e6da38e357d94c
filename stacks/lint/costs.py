"""Hourly cost of templates: instances at their desired capacity, and network resources billed by the hour.

An estimate: charges for requests, bytes and storage depend on use and are left out. Resources without a known price are
listed without one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.prices import HOURS_A_MONTH, Prices
from nxpipe.stacks.lint.launches import (
    BATCH,
    GROUP,
    INSTANCE,
    NODES,
    Launch,
    compute,
    instance_types,
    launches,
    scaled_groups,
    size_of,
)
from nxpipe.stacks.lint.template import Resource, Templates, listed, settings, tables
from nxpipe.stacks.names import SHORT_JOBS_TAG

_NAT: Final = "AWS::EC2::NatGateway"
_ENDPOINT: Final = "AWS::EC2::VPCEndpoint"
_HOSTED: Final = "AWS::SageMaker::Endpoint"
_CLUSTER: Final = "AWS::EKS::Cluster"
_BALANCER: Final = "AWS::ElasticLoadBalancingV2::LoadBalancer"
_FILE_SYSTEM: Final = "AWS::FSx::FileSystem"


@dataclass(frozen=True)
class Line:
    """Hourly cost of one resource; None if its price is unknown or was paid in advance."""

    resource: Resource
    what: str
    hourly: float | None
    remark: str = ""
    at_most: bool = False  # spot instances and mixed groups: priced as the dearest type on demand
    unlisted: bool = False  # billed by the hour at a price that the list lacks
    scaled: tuple[float, float] | None = None  # hourly cost of the fewest and of the most instances

    def __str__(self) -> str:
        return f"{self.what} ({self.resource.path}){', at most' if self.at_most else ''}{self.remark}"


@dataclass(frozen=True)
class Estimate:
    """Costs of all resources that are billed by the hour."""

    lines: tuple[Line, ...]
    prices: Prices

    @cached_property
    def hourly(self) -> float:
        return sum(line.hourly or 0.0 for line in self.lines)

    @property
    def monthly(self) -> float:
        return self.hourly * HOURS_A_MONTH

    @cached_property
    def scaled(self) -> tuple[float, float]:
        """Monthly cost with the fewest and with the most instances of the groups that scale by load."""
        ranges = [line.scaled or (line.hourly or 0.0, line.hourly or 0.0) for line in self.lines]
        least, most = (sum(ends) * HOURS_A_MONTH for ends in zip(*ranges, strict=True)) if ranges else (0.0, 0.0)
        return least, most

    @property
    def range(self) -> str:
        """The monthly cost between both sizes of the groups that scale, as the rest of a sentence; empty without."""
        if not any(line.scaled for line in self.lines):
            return ""
        return f"; {_dollars(self.scaled[0], 0)} to {_dollars(self.scaled[1], 0)} a month with target tracking"

    def __str__(self) -> str:
        """The text of the estimate: the dearest first, then resources that are not in the sum."""
        priced = sorted((line for line in self.lines if line.hourly), key=lambda line: -(line.hourly or 0))
        priced_lines = [f"  {_dollars(line.hourly or 0, 4)} {line}" for line in priced]
        unpriced: dict[tuple[str, str], list[str]] = {}
        for line in self.lines:
            if line.hourly is None:
                unpriced.setdefault((line.what, line.remark), []).append(line.resource.path)
        left_out = [f"  not included: {what} ({_places(paths)}){remark}" for (what, remark), paths in unpriced.items()]
        head = f"{self._qualifier(bool(unpriced))} {_dollars(self.hourly)} an hour, {_dollars(self.monthly, 0)} a month"
        head += self.range
        return "\n".join([f"{head}, by list prices of {self.prices.date}:", *priced_lines, *left_out])

    def _qualifier(self, incomplete: bool) -> str:
        """Resources without a price make the estimate a lower bound, spot instances an upper bound."""
        at_most = any(line.at_most for line in self.lines)
        return {(True, False): "At least", (False, True): "At most"}.get((incomplete, at_most), "About")


def estimate(templates: Templates, prices: Prices) -> Estimate:
    lines = [
        *_of_instances(templates, prices),
        *_of_endpoints(templates, prices),
        *_of_fixed_resources(templates, prices),
    ]
    for resource in templates.of(_FILE_SYSTEM):
        lines.append(Line(resource, resource.type, None, ": no price known"))
    return Estimate(tuple(lines), prices)


def _of_instances(templates: Templates, prices: Prices) -> Iterator[Line]:
    launched_by = {user.key: launch for launch in launches(templates) for user in launch.users}
    scaled = scaled_groups(templates)
    for group in templates.of(GROUP):
        launch = launched_by.get(group.key)
        count = _number(size_of(group))
        spot = "MixedInstancesPolicy" in group.properties or (launch is not None and _market(launch) == "spot")
        for line in _instances(group, launch, count, prices, at_most=spot):
            yield _with_range(line, count, scaled.get(group.key))
    for nodes in templates.of(NODES):
        spot = nodes.properties.get("CapacityType") == "SPOT"
        count = _number(size_of(nodes))
        yield from _instances(nodes, launched_by.get(nodes.key), count, prices, at_most=spot)
    for environment in templates.of(BATCH):
        yield from _jobs(environment, launched_by.get(environment.key), prices)
    for launch in launches(templates):
        if launch.resource.type == INSTANCE:
            yield from _instances(launch.resource, launch, 1, prices)


def _with_range(line: Line, count: int | None, sizes: tuple[int, int] | None) -> Line:
    if sizes is None or not count or line.hourly is None:
        return line
    least, most = (line.hourly / count * size for size in sizes)
    return replace(line, remark=f"{line.remark}, {sizes[0]} to {sizes[1]} by load", scaled=(least, most))


def _instances(
    at: Resource,
    launch: Launch | None,
    count: int | None,
    prices: Prices,
    remark: str = "",
    *,
    at_most: bool = False,
) -> Iterator[Line]:
    """Cost of a group at the price of its dearest instance type, so that the estimate is not too low."""
    types = tuple(instance_types(at)) or (launch.types if launch is not None else ())
    if launch is not None and launch.block:
        yield Line(at, f"a capacity block of {', '.join(types)}", None, ": paid at purchase")
        return
    if count == 0:
        return
    if not types:
        yield Line(at, "instances", None, ": of a type known at deployment only")
        return
    for unknown in [type_ for type_ in types if prices.of(at.region, type_) is None]:
        yield _unlisted(at, unknown)
    known = [(price, type_) for type_ in types if (price := prices.of(at.region, type_)) is not None]
    if known:
        price, dearest = max(known)
        if count is None:
            yield Line(at, dearest, None, ": in a number known at deployment only")
        else:
            yield Line(at, f"{count} × {dearest}", count * price, remark, at_most)


def _jobs(environment: Resource, launch: Launch | None, prices: Prices) -> Iterator[Line]:
    """Cost of a Batch environment at its maximum number of vCPUs; instances run while jobs do."""
    types, maximum = instance_types(environment), _number(compute(environment).get("MaxvCpus"))
    vcpus = [INSTANCES[type_].vcpus for type_ in types if type_ in INSTANCES]
    if len(vcpus) < len(types) or not types:
        yield Line(environment, "Batch", None, f": of {', '.join(types) or 'types'} that Batch chooses, while jobs run")
        return
    if settings(environment.properties, "Tags").get(SHORT_JOBS_TAG) == "true":
        yield from (_short_job(environment, type_, prices) for type_ in types)
        return
    count = None if maximum is None else maximum // min(vcpus)
    spot = str(compute(environment).get("Type")).upper() == "SPOT"
    yield from _instances(environment, launch, count, prices, ", while jobs run", at_most=spot)


def _short_job(environment: Resource, type_: str, prices: Prices) -> Line:
    """Instances that run for minutes a week: a price, which is in no sum by the month."""
    price = prices.of(environment.region, type_)
    if price is None:
        return _unlisted(environment, type_)
    return Line(environment, type_, None, f": {_dollars(price)} an hour, while a job of `nxpipe prove` runs")


def _of_endpoints(templates: Templates, prices: Prices) -> Iterator[Line]:
    """Cost of SageMaker endpoints, whose instance types are ml.*, with prices of their own."""
    for endpoint in templates.of(_HOSTED):
        config = templates.follow(endpoint.properties.get("EndpointConfigName"), endpoint)
        variants = tables(config.properties, "ProductionVariants") if config is not None else []
        if not variants:
            yield Line(endpoint, "instances", None, ": of a type known at deployment only")
        for variant in variants:
            count, type_ = _number(variant.get("InitialInstanceCount")), str(variant.get("InstanceType"))
            price = prices.of(endpoint.region, type_)
            if price is None or count is None:
                yield _unlisted(endpoint, f"{count or 'some'} × {type_}")
            else:
                yield Line(endpoint, f"{count} × {type_}", count * price)


def _of_fixed_resources(templates: Templates, prices: Prices) -> Iterator[Line]:
    for gateway in templates.of(_NAT):
        yield _line(gateway, "NAT gateway", 1, prices)
    for endpoint in templates.of(_ENDPOINT):
        if endpoint.properties.get("VpcEndpointType") == "Interface":
            yield _line(endpoint, "endpoint", max(1, len(listed(endpoint.properties.get("SubnetIds")))), prices)
    for balancer in templates.of(_BALANCER):
        price = prices.of(balancer.region, _BALANCER)
        remark = ": no price known" if price is None else ", without its capacity units"
        yield Line(balancer, _BALANCER if price is None else "load balancer", price, remark)
    for cluster in templates.of(_CLUSTER):
        yield _line(cluster, "control plane of EKS", 1, prices)


def _line(resource: Resource, what: str, count: int, prices: Prices) -> Line:
    price = prices.of(resource.region, resource.type)
    if price is None:
        return _unlisted(resource, what)
    return Line(resource, f"{count} × {what}", count * price)


def _unlisted(resource: Resource, what: str) -> Line:
    return Line(resource, what, None, f": no price known in {_where(resource)}", unlisted=True)


def _where(at: Resource) -> str:
    return at.region or "a region known at deployment only"


def _market(launch: Launch) -> object:
    options = launch.data.get("InstanceMarketOptions")
    return options.get("MarketType") if isinstance(options, Mapping) else None


def _number(value: object) -> int | None:
    return int(str(value)) if str(value).isdigit() else None


def _places(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _dollars(amount: float, digits: int = 2) -> str:
    return f"${amount:,.{digits}f}"
