"""Instance launches in templates: launch templates, their instance types, and the groups that use them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from nxpipe.stacks.lint.template import Properties, Resource, Templates, listed, settings, tables

GROUP = "AWS::AutoScaling::AutoScalingGroup"
BATCH = "AWS::Batch::ComputeEnvironment"
NODES = "AWS::EKS::Nodegroup"
TEMPLATE = "AWS::EC2::LaunchTemplate"
INSTANCE = "AWS::EC2::Instance"

_EFA = ("efa", "efa-only")


@dataclass(frozen=True)
class Launch:
    """A launch template or a single instance, with the groups that use it."""

    resource: Resource
    users: tuple[Resource, ...]

    @property
    def data(self) -> Properties:
        if self.resource.type == INSTANCE:
            return self.resource.properties
        return settings(self.resource.properties, "LaunchTemplateData")

    @property
    def inside(self) -> str:
        """Path prefix of the launch data, for the place of a finding."""
        return "" if self.resource.type == INSTANCE else "LaunchTemplateData/"

    @cached_property
    def types(self) -> tuple[str, ...]:
        own = self.data.get("InstanceType")
        types = [own] if isinstance(own, str) else []
        types += [type_ for user in self.users for type_ in instance_types(user)]
        return tuple(dict.fromkeys(types))

    @property
    def interfaces(self) -> list[Properties]:
        return tables(self.data, "NetworkInterfaces")

    @property
    def efa(self) -> bool:
        return any(interface.get("InterfaceType") in _EFA for interface in self.interfaces)

    @property
    def block(self) -> bool:
        return settings(self.data, "InstanceMarketOptions").get("MarketType") == "capacity-block"

    @property
    def reservation(self) -> str | None:
        specification = settings(self.data, "CapacityReservationSpecification")
        id_ = settings(specification, "CapacityReservationTarget").get("CapacityReservationId")
        return id_ if isinstance(id_, str) else None


def launches(all_: Templates) -> Iterator[Launch]:
    users: dict[tuple[str, str], list[Resource]] = {}
    for user in all_.of(GROUP, BATCH, NODES):
        for specification in specifications(user):
            template = all_.follow(specification.get("LaunchTemplateId") or specification.get("Id"), user)
            if template is not None:
                users.setdefault(template.key, []).append(user)
    for resource in all_.of(TEMPLATE, INSTANCE):
        yield Launch(resource, tuple(users.get(resource.key, ())))


def specifications(user: Resource) -> list[Properties]:
    """Launch template specifications of an Auto Scaling group, a Batch environment or a node group."""
    properties = compute(user)
    mixed = settings(settings(properties, "MixedInstancesPolicy"), "LaunchTemplate")
    specifications = [settings(properties, "LaunchTemplate"), settings(mixed, "LaunchTemplateSpecification")]
    specifications += [settings(override, "LaunchTemplateSpecification") for override in tables(mixed, "Overrides")]
    return [specification for specification in specifications if specification]


def compute(user: Resource) -> Properties:
    """Compute properties: in Batch a nested table, elsewhere the resource's own properties."""
    return settings(user.properties, "ComputeResources") if user.type == BATCH else user.properties


def instance_types(user: Resource) -> list[str]:
    properties = compute(user)
    mixed = settings(settings(properties, "MixedInstancesPolicy"), "LaunchTemplate")
    types = [
        *listed(properties.get("InstanceTypes")),
        *(override.get("InstanceType") for override in tables(mixed, "Overrides")),
    ]
    return [type_ for type_ in types if isinstance(type_, str)]


def size_of(user: Resource) -> object:
    """Desired number of instances of a group or node group."""
    if user.type == NODES:
        scaling = settings(user.properties, "ScalingConfig")
        return scaling.get("DesiredSize", scaling.get("MinSize", 1))  # EKS's defaults
    return user.properties.get("DesiredCapacity", user.properties.get("MinSize", 0))


_POLICY: Final = "AWS::AutoScaling::ScalingPolicy"
MINIMUM: Final = "nxpipe:minimum"  # metadata of a policy: the minimum that a group gets while it serves


def scaled_groups(all_: Templates) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Minimum and maximum number of instances of the groups with a scaling policy, by their keys."""
    found = {}
    groups = {str(group.properties.get("AutoScalingGroupName")): group for group in all_.of(GROUP)}
    for policy in all_.of(_POLICY):
        name = policy.properties.get("AutoScalingGroupName")
        group = groups.get(str(name)) or all_.follow(name, policy)
        if group is not None:
            sizes = (policy.metadata.get(MINIMUM, group.properties.get("MinSize")), group.properties.get("MaxSize"))
            if all(str(size).isdigit() for size in sizes):
                least, most = (int(str(size)) for size in sizes)
                found[group.key] = (least, most)
    return found


def subnets(user: Resource) -> tuple[str, list[object] | None]:
    """Name of the property with the subnets, and its value if that is a list."""
    key = "VPCZoneIdentifier" if user.type == GROUP else "Subnets"
    value = compute(user).get(key)
    return key, value if isinstance(value, list) else None
