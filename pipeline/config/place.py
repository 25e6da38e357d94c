"""Where in AWS the fleets are. Stacks have to know it, builds do not: it is asked for only where it is needed."""

from collections.abc import Iterator
from typing import Final

from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.faults import Finding
from nxpipe.pipeline.config.fleets import TrainingFleet
from nxpipe.pipeline.config.network import ExistingNetwork
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.wording import shown

LONGEST_ENDPOINT_NAME: Final = 63


def has_network(config: Config) -> bool:
    """Whether anything of the file runs on machines: a project that only keeps artifacts needs none."""
    return bool(config.fleets or config.endpoints or config.farm or config.cluster)


def zones_of(config: Config) -> tuple[str, ...]:
    """The zones that have a subnet, in the order of the file."""
    network, region = config.network, config.project.region
    if isinstance(network, ExistingNetwork):
        return tuple(each.zone for each in network.subnets)
    return network.zones or (f"{region}a", f"{region}b")


def misplaced(config: Config) -> Iterator[Finding]:
    """What keeps the stacks from having a place, or a role from having a bound."""
    yield from _moving_key(config)
    region = config.project.region
    if not has_network(config):
        return
    if region is None:
        yield Finding(("project", "region"), "nothing", "a region, for the subnets of the fleets are in its zones")
        return
    zones = zones_of(config)
    yield from _misplaced_zones(config, region, zones)
    yield from _misplaced_fleets(config, zones)
    if config.cluster:
        yield from _misplaced_nodes(config.cluster, zones)
    yield from _misplaced_endpoints(config)


def _moving_key(config: Config) -> Iterator[Finding]:
    named = {("signing", "key"): config.signing.key} | {
        ("signing", "promoting", at, "key"): each.key for at, each in enumerate(config.signing.promoting)
    }
    for place, key in named.items() if config.release else ():
        if ":alias/" not in (key or ""):
            continue
        allowed = 'the ARN of the key itself ("kms:arn:...:key/ID"): the role of releases may use that key and no other'
        yield Finding(place, shown(key), allowed)


def _misplaced_zones(config: Config, region: str, zones: tuple[str, ...]) -> Iterator[Finding]:
    for index, zone in enumerate(zones):
        if not zone.startswith(region) or len(zone) != len(region) + 1:
            yield Finding(_path(config, index), shown(zone), f"a zone of {region}, which is the region of the project")
        elif zone in zones[:index]:
            yield Finding(_path(config, index), shown(zone), "another zone: this one has a subnet already")


def _misplaced_fleets(config: Config, zones: tuple[str, ...]) -> Iterator[Finding]:
    for index, fleet in enumerate(config.fleets):
        if isinstance(fleet, TrainingFleet) and fleet.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Finding(("fleets", index, "zone"), shown(fleet.zone), allowed)
        if isinstance(fleet, TrainingFleet) and fleet.capacity.kind == "spot" and fleet.nodes > 1:
            allowed = "1, or another kind of capacity: AWS Batch runs no job of several nodes on spot instances"
            yield Finding(("fleets", index, "nodes"), shown(fleet.nodes), allowed)


def _misplaced_nodes(cluster: Cluster, zones: tuple[str, ...]) -> Iterator[Finding]:
    if len(zones) < 2:
        yield Finding(("cluster",), shown(zones), "two zones for it in network.zones: EKS has its interfaces in both")
    for index, group in enumerate(cluster.groups):
        if group.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Finding(("cluster", "groups", index, "zone"), shown(group.zone), allowed)


def _misplaced_endpoints(config: Config) -> Iterator[Finding]:
    room = LONGEST_ENDPOINT_NAME - len(config.project.name) - 1
    for index, endpoint in enumerate(config.endpoints):
        if len(endpoint.name) > room:
            allowed = (
                f"at most {room} characters, for SageMaker takes {LONGEST_ENDPOINT_NAME} with the project's before them"
            )
            yield Finding(("endpoints", index, "name"), shown(endpoint.name), allowed)
        if f".ecr.{config.project.region}." not in endpoint.image:
            allowed = f"an image in ECR of {config.project.region}: SageMaker takes none from another region"
            yield Finding(("endpoints", index, "image"), shown(endpoint.image), allowed)


def _path(config: Config, index: int) -> tuple[str | int, ...]:
    if isinstance(config.network, ExistingNetwork):
        return ("network", "subnets", index, "zone")
    return ("network", "zones", index)
