"""Instance launches in templates: launch templates, their instance types, and the groups that use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from nxpipe.stacks.lint.template import Properties, Resource, Templates, listed, settings, tables

GROUP = "AWS::AutoScaling::AutoScalingGroup"
BATCH = "AWS::Batch::ComputeEnvironment"
NODES = "AWS::EKS::Nodegroup"
TEMPLATE = "AWS::EC2::LaunchTemplate"
INSTANCE = "AWS::EC2::Instance"

_EFA = ("efa", "efa-only")


@dataclass(frozen=True)
class Launch:
    """A launch template, or an instance that a template makes by itself."""

    resource: Resource
    users: tuple[Resource, ...]

    @property
    def data(self) -> Properties:
        if self.resource.type == INSTANCE:
            return self.resource.properties
        return settings(self.resource.properties, "LaunchTemplateData")

    @property
    def inside(self) -> str:
        """The path of its data, for the place of a finding."""
        return "" if self.resource.type == INSTANCE else "LaunchTemplateData/"

    @cached_property
    def types(self) -> tuple[str, ...]:
        own = self.data.get("InstanceType")
        found = [own] if isinstance(own, str) else []
        found += [each for user in self.users for each in instance_types(user)]
        return tuple(dict.fromkeys(found))

    @property
    def interfaces(self) -> list[Properties]:
        return tables(self.data, "NetworkInterfaces")

    @property
    def efa(self) -> bool:
        return any(each.get("InterfaceType") in _EFA for each in self.interfaces)

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
            found = all_.follow(specification.get("LaunchTemplateId") or specification.get("Id"), user)
            if found is not None:
                users.setdefault(found.key, []).append(user)
    for resource in all_.of(TEMPLATE, INSTANCE):
        yield Launch(resource, tuple(users.get(resource.key, ())))


def specifications(user: Resource) -> list[Properties]:
    """The launch templates that a group, an environment or a node group names."""
    properties = compute(user)
    mixed = settings(settings(properties, "MixedInstancesPolicy"), "LaunchTemplate")
    found = [settings(properties, "LaunchTemplate"), settings(mixed, "LaunchTemplateSpecification")]
    found += [settings(each, "LaunchTemplateSpecification") for each in tables(mixed, "Overrides")]
    return [each for each in found if each]


def compute(user: Resource) -> Properties:
    """Batch keeps what other services have at the top in a table of its own."""
    return settings(user.properties, "ComputeResources") if user.type == BATCH else user.properties


def instance_types(user: Resource) -> list[str]:
    properties = compute(user)
    mixed = settings(settings(properties, "MixedInstancesPolicy"), "LaunchTemplate")
    found = [
        *listed(properties.get("InstanceTypes")),
        *(each.get("InstanceType") for each in tables(mixed, "Overrides")),
    ]
    return [each for each in found if isinstance(each, str)]


def size_of(user: Resource) -> object:
    """How many instances a group or a node group asks for."""
    if user.type == NODES:
        scaling = settings(user.properties, "ScalingConfig")
        return scaling.get("DesiredSize", scaling.get("MinSize", 1))  # EKS's own choice
    return user.properties.get("DesiredCapacity", user.properties.get("MinSize", 0))


def subnets(user: Resource) -> tuple[str, list[object] | None]:
    """The property that says where instances are started, and its subnets if they are listed."""
    key = "VPCZoneIdentifier" if user.type == GROUP else "Subnets"
    value = compute(user).get(key)
    return key, value if isinstance(value, list) else None
