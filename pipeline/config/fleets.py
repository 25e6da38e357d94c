"""What runs where: one table for each fleet. The shapes of the tables leave no room for pairs that EC2 refuses."""

from datetime import UTC, datetime
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from emulator.hardware import INSTANCES
from pipeline.config.forms import Absent, Unit, one_of, refuse
from pipeline.config.kinds import DISTINCT, JUST_ONE, LIST, ReservationId, Slug, Subnet, Vpc
from pipeline.config.table import Table

# An UltraServer is not a size that EC2 launches by one name.
_LAUNCHABLE = {name: entry for name, entry in INSTANCES.items() if entry.servers == 1}
# Inf2 instances cannot take part in collectives across instances.
_TRAINABLE = [name for name, entry in _LAUNCHABLE.items() if entry.compiler_target != "inf2"]

ServingType = Annotated[str, one_of(_LAUNCHABLE)]
TrainingType = Annotated[str, one_of(_TRAINABLE)]

# How EC2 sells the sizes, by its DescribeInstanceTypes: not a property of the hardware.
_IN_CAPACITY_BLOCKS: Final = ("trn1.32xlarge", "trn2.48xlarge", "trn2u.48xlarge")
_NEVER_SPOT: Final = ("trn2u.48xlarge",)


class OnDemand(Table):
    """Capacity as EC2 has it when it is asked for."""

    kind: Literal["on-demand"] = Field(description="How the capacity is bought.", examples=["on-demand"])


class Spot(Table):
    """Spare capacity, cheaper, that EC2 may take back at two minutes' notice."""

    kind: Literal["spot"] = Field(description="How the capacity is bought.", examples=["spot"])


class Reservation(Table):
    """An on-demand capacity reservation."""

    kind: Literal["reservation"] = Field(description="How the capacity is bought.", examples=["reservation"])
    id: ReservationId = Field(description="The reservation.", examples=["cr-0a1b2c3d4e5f60718"])


class CapacityBlock(Table):
    """Capacity for ML that was bought ahead for fixed days."""

    kind: Literal["capacity-block"] = Field(description="How the capacity is bought.", examples=["capacity-block"])
    id: ReservationId = Field(description="The block's reservation.", examples=["cr-0a1b2c3d4e5f60718"])
    start: Annotated[datetime | None, Absent("the reservation's own")] = Field(
        default=None,
        description="When the block begins; the fleet stays empty before.",
        examples=[datetime(2026, 11, 1, 11, 30, tzinfo=UTC)],
    )
    end: Annotated[datetime | None, Absent("the reservation's own")] = Field(
        default=None,
        description="When the block ends; the fleet is drained before.",
        examples=[datetime(2026, 11, 8, 11, 30, tzinfo=UTC)],
    )

    @field_validator("start", "end")
    @classmethod
    def _says_its_offset(cls, moment: datetime | None) -> datetime | None:
        if moment is not None and moment.tzinfo is None:
            raise refuse(f"an offset after it, such as {moment.isoformat()}Z: a block is bought in UTC")
        return moment

    @field_validator("end")
    @classmethod
    def _after_the_start(cls, end: datetime | None, info: ValidationInfo) -> datetime | None:
        start = info.data.get("start")
        if end is not None and start is not None and end <= start:
            raise refuse(f"a time after the block's start, which is {start.isoformat()}")
        return end


Capacity: TypeAlias = Annotated[OnDemand | Spot | Reservation | CapacityBlock, Field(discriminator="kind")]

_Instances = Annotated[int, Field(ge=0, le=1000), Unit("instances")]


class Size(Table):
    """How many instances a serving fleet has."""

    min: _Instances = Field(description="The fewest instances.", examples=[1])
    desired: Annotated[_Instances, Absent("as `min`")] = Field(
        default_factory=lambda earlier: int(earlier["min"]), description="The instances to begin with.", examples=[2]
    )
    max: _Instances = Field(description="The most instances, those of a rollout included.", examples=[4])

    @field_validator("desired", "max")
    @classmethod
    def _not_below(cls, count: int, info: ValidationInfo) -> int:
        least = max(info.data.get("min", 0), info.data.get("desired", 0))
        if count < least:
            raise refuse(f"at least {least}, for min <= desired <= max")
        return count


class ServingNetwork(Table):
    """The network that a serving fleet joins."""

    vpc: Vpc = Field(description="The VPC.", examples=["vpc-0a1b2c3d4e5f60718"])
    subnets: Annotated[tuple[Subnet, ...], LIST, DISTINCT] = Field(
        description="The subnets that instances are launched in.", examples=[["subnet-0a1b2c3d4e5f60718"]]
    )


class TrainingNetwork(Table):
    """The network that a training fleet joins: collectives need all of its instances in one subnet."""

    vpc: Vpc = Field(description="The VPC.", examples=["vpc-0a1b2c3d4e5f60718"])
    subnets: Annotated[tuple[Subnet, ...], JUST_ONE] = Field(
        description="The one subnet that instances are launched in.", examples=[["subnet-0a1b2c3d4e5f60718"]]
    )


_Name = Annotated[Slug, Field(description="What stacks and commands call the fleet.", examples=["search"])]
_ModelName = Annotated[Slug, Field(description="The `name` of one of the models.", examples=["bert"])]
_Channel = Annotated[
    Slug, Field(description="The channel whose newest artifact the fleet runs.", examples=["production"])
]
_Capacity = Annotated[Capacity, Field(description="How the instances are bought.")]
_OWN_NETWORK = Absent("a network of its own is made")


def _sold_so(capacity: Capacity, info: ValidationInfo) -> Capacity:
    types: tuple[str, ...] = info.data.get("instance_types", ())
    if capacity.kind == "capacity-block" and (wrong := [each for each in types if each not in _IN_CAPACITY_BLOCKS]):
        raise refuse(
            f"another kind: EC2 sells capacity blocks of {', '.join(_IN_CAPACITY_BLOCKS)}, not of {wrong[0]}",
            found='kind = "capacity-block"',
        )
    if capacity.kind == "spot" and (wrong := [each for each in types if each in _NEVER_SPOT]):
        raise refuse(f"another kind: EC2 sells no {wrong[0]} on the spot market", found='kind = "spot"')
    return capacity


class ServingFleet(Table):
    """Instances behind a load balancer that answer requests."""

    kind: Literal["serving"] = Field(description="What the fleet is for.", examples=["serving"])
    name: _Name
    model: _ModelName
    channel: _Channel
    instance_types: Annotated[tuple[ServingType, ...], LIST, DISTINCT] = Field(
        description="The instance types to choose from, best first, all of one compiler target.",
        examples=[["inf2.xlarge", "inf2.8xlarge"]],
    )
    capacity: _Capacity
    size: Size = Field(description="How many instances the fleet has.")
    network: Annotated[ServingNetwork | None, _OWN_NETWORK] = Field(
        default=None, description="A VPC that exists already."
    )

    @field_validator("instance_types")
    @classmethod
    def _one_compiler_target(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        targets = {INSTANCES[each].compiler_target: each for each in types}
        if len(targets) > 1:
            compiled = ", ".join(f"{each} runs programs for {target}" for target, each in targets.items())
            raise refuse(f"instance types of one compiler target: {compiled}")
        return types

    _check_capacity = field_validator("capacity")(_sold_so)


class TrainingFleet(Table):
    """Instances that train one model together."""

    kind: Literal["training"] = Field(description="What the fleet is for.", examples=["training"])
    name: _Name
    model: _ModelName
    channel: _Channel
    instance_types: Annotated[tuple[TrainingType, ...], JUST_ONE] = Field(
        description="The instance type; all nodes have the same.", examples=[["trn1.32xlarge"]]
    )
    capacity: _Capacity
    nodes: Annotated[int, Field(ge=1, le=512), Unit("instances")] = Field(
        description="How many instances train together.", examples=[4]
    )
    network: Annotated[TrainingNetwork | None, _OWN_NETWORK] = Field(
        default=None, description="A VPC that exists already."
    )

    @field_validator("nodes")
    @classmethod
    def _nodes_can_talk(cls, nodes: int, info: ValidationInfo) -> int:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        if nodes > 1 and types and not INSTANCES[types[0]].efa_interfaces:
            raise refuse(f"1: a {types[0]} has no Elastic Fabric Adapter, so its nodes could not train together")
        return nodes

    _check_capacity = field_validator("capacity")(_sold_so)


Fleet: TypeAlias = Annotated[ServingFleet | TrainingFleet, Field(discriminator="kind")]
