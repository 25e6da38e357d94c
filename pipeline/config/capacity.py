"""How instances are bought. Each kind holds only what it may, so that a pair that EC2 refuses cannot be written."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.pipeline.config.forms import Absent, Unit, one_of, refuse
from nxpipe.pipeline.config.kinds import ReservationId
from nxpipe.pipeline.config.table import Table

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
