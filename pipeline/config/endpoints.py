"""The tables [[endpoints]]: SageMaker endpoints, which serve a model without a fleet of the project."""

from datetime import timedelta
from math import ceil
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.config.kinds import EcrImage, Slug, duration, write_duration
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse, text

_PREFIX: Final = "ml."
# From SageMaker's ProductionVariant: a property of the service, not of the hardware.
_HOSTED_FAMILIES: Final = ("inf2", "trn1", "trn1n")
# Nitro instances with NVMe disks: of a fixed size, so no volume can be set, and encrypted by the hardware, so
# CreateEndpointConfig fails with a KMS key.
_WITH_LOCAL_DISKS: Final = ("trn1", "trn1n")
HOSTED: Final = {_PREFIX + name: entry for name, entry in INSTANCES.items() if entry.family in _HOSTED_FAMILIES}


def has_local_disks(instance_type: str) -> bool:
    """True for a type in SageMaker's notation that has disks of its own instead of a volume."""
    return instance_type in HOSTED and HOSTED[instance_type].family in _WITH_LOCAL_DISKS


LONGEST_UPDATE: Final = timedelta(hours=8)  # the limit after which SageMaker cancels an update
OLD_FLEET_KEPT: Final = timedelta(minutes=5)  # after the last step, for requests in progress

_KIND: Final = "The traffic shifting mode."
_BAKE: Final = "The bake time of each step; an alarm rolls back."
# An alarm evaluates three minutes.
_Bake = Annotated[timedelta, duration("3m", "1h"), Field(description=_BAKE, examples=["10m"])]


class Canary(Table):
    """Two steps: first a share of the new instances, then all."""

    kind: Literal["canary"] = Field(description=_KIND, examples=["canary"])
    percent: Annotated[int, Field(ge=1, le=50), Unit("percent of the instances")] = Field(
        description="The share of the first step.", examples=[25]
    )
    bake: _Bake

    @property
    def steps(self) -> int:
        return 2


class Linear(Table):
    """Equal steps."""

    kind: Literal["linear"] = Field(description=_KIND, examples=["linear"])
    percent: Annotated[int, Field(ge=10, le=50), Unit("percent of the instances")] = Field(
        description="The share of each step.", examples=[25]
    )
    bake: _Bake

    @property
    def steps(self) -> int:
        return ceil(100 / self.percent)


class AllAtOnce(Table):
    """One step with rollback by alarms; the only mode for a single instance."""

    kind: Literal["all-at-once"] = Field(description=_KIND, examples=["all-at-once"])
    bake: _Bake

    @property
    def steps(self) -> int:
        return 1


Shift: TypeAlias = Annotated[Canary | Linear | AllAtOnce, Field(discriminator="kind")]


def longest_update(ready_within: timedelta, shift: Shift) -> timedelta:
    """The sum of twice `ready_within` (fetch, start), the bake time of each step, and the time for the old fleet."""
    return 2 * ready_within + shift.steps * shift.bake + OLD_FLEET_KEPT


class ModelEndpoint(Table):
    """A SageMaker endpoint: SageMaker manages the instances and shifts traffic to new artifacts."""

    name: Annotated[Slug, Field(description="The name of the endpoint.", examples=["search"])]
    model: Annotated[Slug, Field(description="The `name` of one of the models.", examples=["bert"])]
    artifact: Annotated[str, text("[0-9a-f]{64}", "the digest of an artifact's manifest: 64 hex digits")] = Field(
        description="The artifact, as the SHA-256 digest of its manifest.json. Its folder is "
        "`endpoints/NAME/` in the store's bucket. A new value shifts traffic.",
        examples=["c0a687a1d1aa11dd2a9ae09e589d46c088c2a3f0f0042b828e18f2e45b73fefb"],
    )
    image: EcrImage = Field(
        description="The serving container for SageMaker, pinned by digest. NXPIPE_ARTIFACT is the artifact's"
        " folder. The container has no network access.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/serve@sha256:{'0' * 64}"],
    )
    instance_type: Annotated[str, one_of(HOSTED)] = Field(
        description="The instance type, in SageMaker's notation.", examples=["ml.inf2.xlarge"]
    )
    instances: Annotated[int, Field(ge=1, le=100), Unit("instances")] = Field(
        description="The number of instances; doubled while traffic shifts.", examples=[4]
    )
    ready_within: Annotated[timedelta, duration("1m", "1h")] = Field(
        default=timedelta(minutes=30),
        description="The time limit for an instance to fetch the artifact and answer health checks.",
        examples=["30m"],
    )
    disk: Annotated[int | None, Field(ge=1, le=512), Unit("GiB"), Absent("SageMaker's default")] = Field(
        default=None,
        description="The volume size per instance, for image and artifact.",
        examples=[100],
    )
    shift: Shift = Field(description="The traffic shift to a new artifact.")
    rehearsal: bool = Field(
        default=False,
        description="True: the endpoint rehearses the procedures and may serve programs of the emulator, which no "
        "Neuron device runs. False: `nxpipe store fetch --endpoint` fetches programs of `--backend neuronx` only.",
        examples=[True],
    )

    @property
    def hardware(self) -> Instance:
        return HOSTED[self.instance_type]

    @property
    def has_local_disks(self) -> bool:
        return has_local_disks(self.instance_type)

    @property
    def longest_update(self) -> timedelta:
        return longest_update(self.ready_within, self.shift)

    @field_validator("shift")
    @classmethod
    def _whole_instances(cls, shift: Shift, info: ValidationInfo) -> Shift:
        count = info.data.get("instances")
        if isinstance(shift, AllAtOnce) or count is None:
            return shift
        if count == 1:
            raise refuse('kind = "all-at-once"; one instance cannot split traffic', found=f'kind = "{shift.kind}"')
        if count * shift.percent < 100:
            least = f"at least {ceil(100 / count)} percent, which is one of {count} instances"
            raise refuse(least, found=f"percent = {shift.percent}")
        return shift

    @field_validator("shift")
    @classmethod
    def _within_update_limit(cls, shift: Shift, info: ValidationInfo) -> Shift:
        ready = info.data.get("ready_within")
        if ready is not None and longest_update(ready, shift) > LONGEST_UPDATE:
            raise refuse(
                f"a shorter shift: {shift.steps} steps and twice ready_within exceed the "
                f"{write_duration(LONGEST_UPDATE)} that SageMaker allows for an update",
                found=f'bake = "{write_duration(shift.bake)}"',
            )
        return shift

    @field_validator("disk")
    @classmethod
    def _requires_volume(cls, disk: int | None, info: ValidationInfo) -> int | None:
        type_ = info.data.get("instance_type", "")
        if disk is not None and has_local_disks(type_):
            raise refuse(f"no disk; {type_} has local disks of a fixed size only")
        return disk
