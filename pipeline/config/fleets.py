"""Fleets of instances and how their capacity is bought. A combination that EC2 refuses cannot be expressed."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.kinds import (
    DISTINCT,
    JUST_ONE,
    LIST,
    MAYBE_EMPTY,
    Certificate,
    Cidr,
    Image,
    ReservationId,
    Slug,
    Zone,
    duration,
)
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse, text
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.pipeline.config.root import Config


# How EC2 sells the sizes, by its DescribeInstanceTypes: not a property of the hardware.
IN_CAPACITY_BLOCKS: Final = ("trn1.32xlarge", "trn2.48xlarge", "trn2u.48xlarge")
NEVER_SPOT: Final = ("trn2u.48xlarge",)
DRAINED_BEFORE_THE_END: Final = timedelta(minutes=45)  # EC2 begins to terminate half an hour before

_KIND: Final = "How the capacity is bought."
_RESERVATION = Annotated[ReservationId, Field(description="The reservation.", examples=["cr-0a1b2c3d4e5f60718"])]
_Placement = Annotated[str, one_of(("cluster", "none"))]
_PLACEMENT: Final = (
    "How near the nodes are to each other: in a placement group of their own, or wherever there is room."
)


class WarmPool(Table):
    """Instances that have been started and set up once, and wait stopped."""

    min: Annotated[int, Field(ge=0, le=1000), Unit("instances")] = Field(
        description="How many wait at least.", examples=[1]
    )
    reuse: bool = Field(
        default=True,
        description="Whether an instance that is no longer needed goes back to the pool.",
        examples=[False],
    )


class ServingOnDemand(Table):
    """Capacity as EC2 has it when it is asked for."""

    kind: Literal["on-demand"] = Field(description=_KIND, examples=["on-demand"])
    warm_pool: Annotated[WarmPool | None, Absent("instances are started when they are needed")] = Field(
        default=None, description="Instances that wait stopped; only for a fleet of one instance type."
    )


class ServingSpot(Table):
    """Spare capacity, cheaper, that EC2 may take back at two minutes' notice."""

    kind: Literal["spot"] = Field(description=_KIND, examples=["spot"])
    on_demand_base: Annotated[int, Field(ge=0, le=1000), Unit("instances")] = Field(
        default=1,
        description="How many of the instances are bought on demand, so that not all can go at once.",
        examples=[2],
    )


class ServingReservation(Table):
    """An on-demand capacity reservation."""

    kind: Literal["reservation"] = Field(description=_KIND, examples=["reservation"])
    id: _RESERVATION


class CapacityBlock(Table):
    """Capacity for ML that was bought ahead for fixed days. Its instances are close together already."""

    kind: Literal["capacity-block"] = Field(description=_KIND, examples=["capacity-block"])
    id: ReservationId = Field(description="The block's reservation.", examples=["cr-0a1b2c3d4e5f60718"])
    start: datetime = Field(
        description="When the block begins; the fleet stays empty before.",
        examples=[datetime(2026, 11, 1, 11, 30, tzinfo=UTC)],
    )
    end: datetime = Field(
        description="When the block ends; the fleet is drained 45 minutes before.",
        examples=[datetime(2026, 11, 8, 11, 30, tzinfo=UTC)],
    )

    @field_validator("start", "end")
    @classmethod
    def _says_its_offset(cls, moment: datetime) -> datetime:
        if moment.tzinfo is None:
            raise refuse(f"an offset after it, such as {moment.isoformat()}Z: a block is bought in UTC")
        return moment

    @field_validator("end")
    @classmethod
    def _after_the_start(cls, end: datetime, info: ValidationInfo) -> datetime:
        start = info.data.get("start")
        if start is not None and end <= start + DRAINED_BEFORE_THE_END:
            raise refuse(f"a time more than 45 minutes after the block's start, which is {start.isoformat()}")
        return end


class TrainingOnDemand(Table):
    """Capacity as EC2 has it when it is asked for."""

    kind: Literal["on-demand"] = Field(description=_KIND, examples=["on-demand"])
    placement: _Placement = Field(default="cluster", description=_PLACEMENT, examples=["cluster"])


class TrainingSpot(Table):
    """Spare capacity that EC2 may take back at two minutes' notice; checkpoints go to a bucket of the fleet's own."""

    kind: Literal["spot"] = Field(description=_KIND, examples=["spot"])
    placement: _Placement = Field(default="cluster", description=_PLACEMENT, examples=["cluster"])


class TrainingReservation(Table):
    """An on-demand capacity reservation."""

    kind: Literal["reservation"] = Field(description=_KIND, examples=["reservation"])
    id: _RESERVATION
    placement: _Placement = Field(default="none", description=_PLACEMENT, examples=["none"])


ServingCapacity: TypeAlias = Annotated[
    ServingOnDemand | ServingSpot | ServingReservation | CapacityBlock, Field(discriminator="kind")
]
TrainingCapacity: TypeAlias = Annotated[
    TrainingOnDemand | TrainingSpot | TrainingReservation | CapacityBlock, Field(discriminator="kind")
]
Capacity: TypeAlias = (
    ServingOnDemand
    | ServingSpot
    | ServingReservation
    | TrainingOnDemand
    | TrainingSpot
    | TrainingReservation
    | CapacityBlock
)


def check_sold(capacity: Capacity, types: tuple[str, ...]) -> None:
    """Refuse a kind in which EC2 does not sell one of the types."""
    if capacity.kind == "capacity-block" and (wrong := [each for each in types if each not in IN_CAPACITY_BLOCKS]):
        raise refuse(
            f"another kind: EC2 sells capacity blocks of {', '.join(IN_CAPACITY_BLOCKS)}, not of {wrong[0]}",
            found='kind = "capacity-block"',
        )
    if capacity.kind == "spot" and (wrong := [each for each in types if each in NEVER_SPOT]):
        raise refuse(f"another kind: EC2 sells no {wrong[0]} on the spot market", found='kind = "spot"')


# An UltraServer is not a size that EC2 launches by one name.
_LAUNCHABLE = {name: entry for name, entry in INSTANCES.items() if entry.servers == 1}
# Inf2 instances cannot take part in collectives across instances.
_TRAINABLE = [name for name, entry in _LAUNCHABLE.items() if entry.compiler_target != "inf2"]

ServingType = Annotated[str, one_of(_LAUNCHABLE)]
TrainingType = Annotated[str, one_of(_TRAINABLE)]

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


_Name = Annotated[Slug, Field(description="What stacks and commands call the fleet.", examples=["search"])]
_ModelName = Annotated[Slug, Field(description="The `name` of one of the models.", examples=["bert"])]
_Channel = Annotated[
    Slug, Field(description="The channel whose newest artifact the fleet runs.", examples=["production"])
]
_Words = Annotated[str, text("[!-~](?:[ -~]*[!-~])?", "a word of a command line", longest=1024)]


class Standby(Table):
    """A GPU fleet that keeps running the model, for traffic to go back to while the new fleet earns trust."""

    instance_type: Annotated[
        str, text(r"(?:g|p)[0-9][a-z0-9]*\.[0-9a-z]+", 'a GPU instance type such as "g5.xlarge"', longest=32)
    ] = Field(description="The instance type.", examples=["g5.xlarge"])
    image: Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')] = Field(
        description="The AMI that serves the model when it starts.", examples=["ami-0a1b2c3d4e5f60718"]
    )
    size: Size = Field(description="How many instances the group has.")


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
    capacity: ServingCapacity = Field(description="How the instances are bought.")
    size: Size = Field(description="How many instances the fleet has.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=8000, description="Where the server listens on an instance.", examples=[8000]
    )
    health: Annotated[str, text("/[!-~]*", 'a path such as "/health"')] = Field(
        default="/health", description="The path that answers 200 when the model is loaded.", examples=["/health"]
    )
    ready_within: Annotated[timedelta, duration("1m", "2h")] = Field(
        default=timedelta(minutes=30), description="When an instance that is not ready is given up.", examples=["30m"]
    )
    command: Annotated[tuple[_Words, ...], MAYBE_EMPTY] = Field(
        default=(),
        description="The server, as words. The artifact's folder is in NXPIPE_ARTIFACT. Without one the agent stops "
        "when the artifact is there, and the AMI's own unit serves it.",
        examples=[["python", "-m", "server"]],
    )
    certificate: Annotated[Certificate | None, Absent("plain HTTP, which an acknowledgement of NXP-NET-3 allows")] = (
        Field(
            default=None,
            description="The certificate of the load balancer.",
            examples=["arn:aws:acm:us-east-2:123456789012:certificate/0a1b2c3d"],
        )
    )
    clients: Annotated[tuple[Cidr, ...] | None, LIST, DISTINCT, Absent("the network's own addresses")] = Field(
        default=None, description="Who may call the load balancer.", examples=[["10.0.0.0/8"]]
    )
    standby: Annotated[Standby | None, Absent("none")] = Field(
        default=None, description="A GPU group behind the same load balancer."
    )

    @field_validator("instance_types")
    @classmethod
    def _one_compiler_target(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        targets = {INSTANCES[each].compiler_target: each for each in types}
        if len(targets) > 1:
            compiled = ", ".join(f"{each} runs programs for {target}" for target, each in targets.items())
            raise refuse(f"instance types of one compiler target: {compiled}")
        return types

    @field_validator("capacity")
    @classmethod
    def _sold(cls, capacity: ServingCapacity, info: ValidationInfo) -> ServingCapacity:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        check_sold(capacity, types)
        if len(types) > 1 and capacity.kind == "on-demand" and capacity.warm_pool is not None:
            raise refuse(
                "no warm_pool, or one instance type: EC2 keeps a warm pool of a single type", found="warm_pool"
            )
        if len(types) > 1 and capacity.kind in ("reservation", "capacity-block"):
            raise refuse("one instance type: what was reserved is of a single type", found=f"{len(types)} types")
        return capacity


class Scratch(Table):
    """An FSx for Lustre file system that lives as long as the fleet."""

    size: Annotated[int, Field(ge=1200, le=100800), Unit("GiB")] = Field(
        description="How much it holds, in steps of 1200.", examples=[1200]
    )

    @field_validator("size")
    @classmethod
    def _in_steps(cls, size: int) -> int:
        if size % 1200:
            raise refuse(f"a multiple of 1200 (GiB), such as {max(size // 1200, 1) * 1200}")
        return size


class TrainingFleet(Table):
    """Instances that train one model together."""

    kind: Literal["training"] = Field(description="What the fleet is for.", examples=["training"])
    name: _Name
    model: _ModelName
    channel: _Channel
    instance_types: Annotated[tuple[TrainingType, ...], JUST_ONE] = Field(
        description="The instance type; all nodes have the same.", examples=[["trn1.32xlarge"]]
    )
    zone: Zone = Field(
        description="The availability zone of all nodes: collectives need one subnet.", examples=["us-east-2a"]
    )
    capacity: TrainingCapacity = Field(description="How the instances are bought.")
    nodes: Annotated[int, Field(ge=1, le=512), Unit("instances")] = Field(
        description="How many instances train together.", examples=[4]
    )
    image: Annotated[Image | None, Absent("the project's own repository, tag train")] = Field(
        default=None,
        description="The container that trains, by its digest.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/train@sha256:{'0' * 64}"],
    )
    scratch: Annotated[Scratch | None, Absent("none")] = Field(
        default=None, description="A fast file system beside the nodes, for data sets."
    )

    @field_validator("nodes")
    @classmethod
    def _nodes_can_talk(cls, nodes: int, info: ValidationInfo) -> int:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        if nodes > 1 and types and not INSTANCES[types[0]].efa_interfaces:
            raise refuse(f"1: a {types[0]} has no Elastic Fabric Adapter, so its nodes could not train together")
        return nodes

    @field_validator("capacity")
    @classmethod
    def _sold(cls, capacity: TrainingCapacity, info: ValidationInfo) -> TrainingCapacity:
        check_sold(capacity, info.data.get("instance_types", ()))
        return capacity


Fleet: TypeAlias = Annotated[ServingFleet | TrainingFleet, Field(discriminator="kind")]


def serving_fleets(config: "Config") -> "dict[str, ServingFleet]":
    return {each.name: each for each in config.fleets if isinstance(each, ServingFleet)}


def serving_fleet(config: "Config", name: str, option: str) -> "ServingFleet":
    """The fleet of that name; `option` is the option or argument that holds it."""
    fleets = serving_fleets(config)
    if name not in fleets:
        hint = did_you_mean(name, fleets) or f"; there are {', '.join(fleets) or 'none'}"
        raise InputInvalid(f"{option}: nxpipe.toml has no serving fleet {name!r}{hint}")
    return fleets[name]
