"""Where in AWS the fleets are. Stacks have to know it, builds do not: it is asked for only where it is needed."""

from collections.abc import Iterator

from pipeline.config.faults import Finding
from pipeline.config.fleets import TrainingFleet
from pipeline.config.network import ExistingNetwork
from pipeline.config.root import Config
from pipeline.config.wording import shown


def has_network(config: Config) -> bool:
    """Whether anything of the file runs on machines: a project that only keeps artifacts needs none."""
    return bool(config.fleets or config.farm)


def zones_of(config: Config) -> tuple[str, ...]:
    """The zones that have a subnet, in the order of the file."""
    network, region = config.network, config.project.region
    if isinstance(network, ExistingNetwork):
        return tuple(each.zone for each in network.subnets)
    return network.zones or (f"{region}a", f"{region}b")


def misplaced(config: Config) -> Iterator[Finding]:
    """What keeps the fleets from having a place."""
    region = config.project.region
    if not has_network(config):
        return
    if region is None:
        yield Finding(("project", "region"), "nothing", "a region, for the subnets of the fleets are in its zones")
        return
    zones = zones_of(config)
    for index, zone in enumerate(zones):
        if not zone.startswith(region) or len(zone) != len(region) + 1:
            yield Finding(_path(config, index), shown(zone), f"a zone of {region}, which is the region of the project")
        elif zone in zones[:index]:
            yield Finding(_path(config, index), shown(zone), "another zone: this one has a subnet already")
    for index, fleet in enumerate(config.fleets):
        if isinstance(fleet, TrainingFleet) and fleet.zone not in zones:
            allowed = f"a zone that has a subnet: {', '.join(zones)} (network.zones)"
            yield Finding(("fleets", index, "zone"), shown(fleet.zone), allowed)
        if isinstance(fleet, TrainingFleet) and fleet.capacity.kind == "spot" and fleet.nodes > 1:
            allowed = "1, or another kind of capacity: AWS Batch runs no job of several nodes on spot instances"
            yield Finding(("fleets", index, "nodes"), shown(fleet.nodes), allowed)


def _path(config: Config, index: int) -> tuple[str | int, ...]:
    if isinstance(config.network, ExistingNetwork):
        return ("network", "subnets", index, "zone")
    return ("network", "zones", index)
