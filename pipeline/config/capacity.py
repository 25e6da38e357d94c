"""Purchase options and sizes of fleets. Combinations that EC2 refuses are invalid."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.kinds import ReservationId
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse

# From EC2's DescribeInstanceTypes: purchase options, not properties of the hardware.
IN_CAPACITY_BLOCKS: Final = ("trn1.32xlarge", "trn2.48xlarge", "trn2u.48xlarge")
NEVER_SPOT: Final = ("trn2u.48xlarge",)
WITH_INSTANCE_STORE: Final = ("trn1", "trn1n", "trn2", "trn2u")  # families, whose sizes all have NVMe disks
DRAINED_BEFORE_THE_END: Final = timedelta(minutes=45)  # EC2 begins to terminate half an hour before

_KIND: Final = "The purchase option."
_RESERVATION = Annotated[
    ReservationId, Field(description="The id of the reservation.", examples=["cr-0a1b2c3d4e5f60718"])
]
_Reserved = Annotated[
    int | None,
    Field(
        ge=1,
        le=1000,
        description="The number of reserved instances. A rollout needs twice the `max` of a serving fleet.",
        examples=[8],
    ),
    Unit("instances"),
    Absent("not compared with the size of the fleet"),
]
_Placement = Annotated[str, one_of(("cluster", "none"))]
_PLACEMENT: Final = "The placement of the nodes: in a cluster placement group, or spread."


class WarmPool(Table):
    """An Auto Scaling warm pool: prepared instances that are stopped."""

    min: Annotated[int, Field(ge=0, le=1000), Unit("instances")] = Field(
        description="The minimum size of the pool.", examples=[1]
    )
    reuse: bool = Field(
        default=True,
        description="Return instances to the pool on scale-in.",
        examples=[False],
    )


class ServingOnDemand(Table):
    """On-demand capacity."""

    kind: Literal["on-demand"] = Field(description=_KIND, examples=["on-demand"])
    warm_pool: Annotated[WarmPool | None, Absent("instances are launched on demand")] = Field(
        default=None, description="Stopped, prepared instances; requires a single instance type."
    )


class ServingSpot(Table):
    """Spot capacity, which EC2 may reclaim at two minutes' notice."""

    kind: Literal["spot"] = Field(description=_KIND, examples=["spot"])
    on_demand_base: Annotated[int, Field(ge=0, le=1000), Unit("instances")] = Field(
        default=1,
        description="The number of on-demand instances, so that EC2 cannot reclaim all.",
        examples=[2],
    )


class ServingReservation(Table):
    """An on-demand capacity reservation."""

    kind: Literal["reservation"] = Field(description=_KIND, examples=["reservation"])
    id: _RESERVATION
    instances: _Reserved = None


class CapacityBlock(Table):
    """A Capacity Block for ML: reserved for fixed dates, with instances in one cluster."""

    kind: Literal["capacity-block"] = Field(description=_KIND, examples=["capacity-block"])
    id: ReservationId = Field(description="The id of the block's reservation.", examples=["cr-0a1b2c3d4e5f60718"])
    instances: _Reserved = None
    start: datetime = Field(
        description="The start of the block; the fleet is empty before.",
        examples=[datetime(2026, 11, 1, 11, 30, tzinfo=UTC)],
    )
    end: datetime = Field(
        description="The end of the block; the fleet is drained 45 minutes before.",
        examples=[datetime(2026, 11, 8, 11, 30, tzinfo=UTC)],
    )

    @property
    def drained(self) -> datetime:
        return (self.end - DRAINED_BEFORE_THE_END).astimezone(UTC)

    def is_open(self, now: datetime) -> bool:
        """True from the start of the block until its instances are drained."""
        return self.start <= now < self.drained

    @field_validator("start", "end")
    @classmethod
    def _require_offset(cls, moment: datetime) -> datetime:
        if moment.tzinfo is None:
            raise refuse(f"a time with an offset, such as {moment.isoformat()}Z; capacity blocks are sold in UTC")
        return moment

    @field_validator("end")
    @classmethod
    def _after_the_start(cls, end: datetime, info: ValidationInfo) -> datetime:
        start = info.data.get("start")
        if start is not None and end <= start + DRAINED_BEFORE_THE_END:
            raise refuse(f"a time more than 45 minutes after the block's start, {start.isoformat()}")
        return end


class TrainingOnDemand(Table):
    """On-demand capacity."""

    kind: Literal["on-demand"] = Field(description=_KIND, examples=["on-demand"])
    placement: _Placement = Field(default="cluster", description=_PLACEMENT, examples=["cluster"])


class TrainingSpot(Table):
    """Spot capacity, which EC2 may reclaim at two minutes' notice; checkpoints are stored in a bucket of the fleet."""

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


_HOST_SHARE: Final = 0.06  # of an instance's memory, for the operating system and the ECS agent


def job_memory_mib(instance_type: str) -> int:
    """The memory of a Batch job that has an instance for itself."""
    return int(INSTANCES[instance_type].host_memory_gib * 1024 * (1 - _HOST_SHARE))


def check_sold(capacity: Capacity, types: tuple[str, ...]) -> None:
    """Refuse a purchase option that EC2 does not offer for one of the types."""
    if capacity.kind == "capacity-block" and (unsold := [name for name in types if name not in IN_CAPACITY_BLOCKS]):
        raise refuse(
            f"another kind: EC2 sells capacity blocks of {', '.join(IN_CAPACITY_BLOCKS)}, not of {unsold[0]}",
            found='kind = "capacity-block"',
        )
    if capacity.kind == "spot" and (unsold := [name for name in types if name in NEVER_SPOT]):
        raise refuse(f"another kind; EC2 sells no {unsold[0]} on the spot market", found='kind = "spot"')


# EC2 launches an UltraServer as several instances, not by one instance type.
_LAUNCHABLE = {name: entry for name, entry in INSTANCES.items() if entry.servers == 1}
# Inf2 instances cannot take part in collectives across instances.
_TRAINABLE = [name for name, entry in _LAUNCHABLE.items() if entry.compiler_target != "inf2"]

ServingType = Annotated[str, one_of(_LAUNCHABLE)]
TrainingType = Annotated[str, one_of(_TRAINABLE)]

_Instances = Annotated[int, Field(ge=0, le=1000), Unit("instances")]


class Size(Table):
    """The size of a serving fleet."""

    min: _Instances = Field(description="The minimum number of instances.", examples=[1])
    desired: Annotated[_Instances, Absent("as `min`")] = Field(
        default_factory=lambda earlier: int(earlier["min"]),
        description="The initial number of instances.",
        examples=[2],
    )
    max: _Instances = Field(
        description="The maximum number of instances of one version; a rollout runs two.", examples=[4]
    )

    @field_validator("desired", "max")
    @classmethod
    def _ordered(cls, count: int, info: ValidationInfo) -> int:
        least = max(info.data.get("min", 0), info.data.get("desired", 0))
        if count < least:
            raise refuse(f"at least {least}, for min <= desired <= max")
        return count
