"""The tables [[fleets]]: fleets of instances and their purchase options. Combinations that EC2 refuses are invalid."""

from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
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
    S3Url,
    Sdk,
    Slug,
    Zone,
    duration,
    write_duration,
)
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse, text
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.pipeline.config.root import Config


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


_Name = Annotated[Slug, Field(description="The name of the fleet in stacks and commands.", examples=["search"])]
_ModelName = Annotated[Slug, Field(description="The `name` of one of the models.", examples=["bert"])]
_Channel = Annotated[
    Slug, Field(description="The channel whose current artifact the fleet runs.", examples=["production"])
]
_Word = Annotated[str, text("[!-~](?:[ -~]*[!-~])?", "a word of a command line", longest=1024)]


class Standby(Table):
    """A GPU fleet that keeps running the model as a fallback for traffic."""

    instance_type: Annotated[
        str, text(r"(?:g|p)[0-9][a-z0-9]*\.[0-9a-z]+", 'a GPU instance type such as "g5.xlarge"', longest=32)
    ] = Field(description="The instance type.", examples=["g5.xlarge"])
    image: Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')] = Field(
        description="The AMI, which serves the model at boot.", examples=["ami-0a1b2c3d4e5f60718"]
    )
    size: Size = Field(description="The number of instances.")


# Limits of EBS volumes of type gp3.
_IOPS_PER_GIB: Final = 500
_IOPS_PER_MIB_S: Final = 4
_SYSTEM_GIB: Final = 100  # for the image's libraries
_LEAST_GIB: Final = 200


def _require_whole_seconds(length: timedelta) -> timedelta:
    if length.microseconds:
        raise refuse("whole seconds, as the load balancer counts")
    return length


class HealthCheck(Table):
    """The load balancer's health check. A server that is busy for less than `timeout` stays in service, and so does one
    that misses fewer than `unhealthy` checks in a row."""

    interval: Annotated[timedelta, duration("5s", "5m")] = Field(
        default=timedelta(seconds=20), description="The time between two checks of an instance.", examples=["20s"]
    )
    timeout: Annotated[timedelta, duration("2s", "2m"), Absent("three quarters of `interval`, at most 15s")] = Field(
        default_factory=lambda earlier: min(
            timedelta(seconds=15), timedelta(seconds=earlier["interval"].seconds * 3 // 4)
        ),
        description="The time limit for the response, shorter than `interval`.",
        examples=["15s"],
    )
    healthy: Annotated[int, Field(ge=2, le=10), Unit("checks")] = Field(
        default=2, description="Successful checks in a row until a failed instance gets requests again.", examples=[2]
    )
    unhealthy: Annotated[int, Field(ge=2, le=10), Unit("checks")] = Field(
        default=5, description="Failed checks in a row until an instance is replaced.", examples=[5]
    )

    _whole = field_validator("interval", "timeout")(_require_whole_seconds)

    @field_validator("timeout")
    @classmethod
    def _shorter_than_the_interval(cls, timeout: timedelta, info: ValidationInfo) -> timedelta:
        interval = info.data.get("interval")
        if interval is not None and timeout >= interval:
            raise refuse(f'a duration shorter than interval, "{write_duration(interval)}"')
        return timeout


_CUT_OFF: Final = timedelta(minutes=15)  # between the drain of a capacity block and its first terminations
_FEW: Final = Field(strict=False, min_length=1, max_length=4)  # a listener rule has at most five values
_ROUTING: Final = ("least-outstanding-requests", "weighted-random")


class ServingFleet(Table):
    """Instances behind a load balancer that serve a model."""

    kind: Literal["serving"] = Field(description="The kind of fleet.", examples=["serving"])
    name: _Name
    model: _ModelName
    channel: _Channel
    instance_types: Annotated[tuple[ServingType, ...], LIST, DISTINCT] = Field(
        description="The acceptable instance types in order of preference, all of one compiler target.",
        examples=[["inf2.xlarge", "inf2.8xlarge"]],
    )
    zone: Annotated[Zone | None, Absent("all zones with a subnet")] = Field(
        default=None,
        description="The availability zone of the instances; required for a reservation or a capacity block, which "
        "has one.",
        examples=["us-east-2a"],
    )
    capacity: ServingCapacity = Field(description="The purchase option of the instances.")
    size: Size = Field(description="The number of instances.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(
        default=8000, description="The port of the server.", examples=[8000]
    )
    health: Annotated[str, text("/[!-~]*", 'a path such as "/health"')] = Field(
        default="/health",
        description="The health check path, which returns 200 once the model is loaded.",
        examples=["/health"],
    )
    health_check: HealthCheck = Field(
        default_factory=HealthCheck, description="Intervals and thresholds of the health check."
    )
    idle_timeout: Annotated[timedelta, duration("1s", "4000s")] = Field(
        default=timedelta(minutes=5),
        description="The time without data after which the load balancer returns 504. The server keeps idle "
        "connections open for longer.",
        examples=["2m"],
    )
    draining: Annotated[timedelta, duration("1s", "1h")] = Field(
        default=timedelta(minutes=5),
        description="The time that open requests have when their instance is removed: at least the longest response.",
        examples=["10m"],
    )
    routing: Annotated[str, one_of(_ROUTING)] = Field(
        default="least-outstanding-requests",
        description="The load balancer's algorithm. weighted-random sends fewer requests to an instance that fails, "
        "if the fleet has at least three.",
        examples=["least-outstanding-requests"],
    )
    ready_within: Annotated[timedelta, duration("1m", "2h")] = Field(
        default=timedelta(minutes=30), description="The time limit for an instance to become ready.", examples=["30m"]
    )
    command: Annotated[tuple[_Word, ...], MAYBE_EMPTY] = Field(
        default=(),
        description="The command line of the server, as a list. NXPIPE_ARTIFACT is the artifact's folder. "
        "Without it, the agent exits once the artifact is in place, and a unit of the AMI serves "
        "it.",
        examples=[["python", "-m", "server"]],
    )
    certificate: Annotated[Certificate | None, Absent("plain HTTP, which requires an acknowledgement of NXP-NET-3")] = (
        Field(
            default=None,
            description="The TLS certificate of the load balancer.",
            examples=["arn:aws:acm:us-east-2:123456789012:certificate/0a1b2c3d"],
        )
    )
    clients: Annotated[tuple[Cidr, ...] | None, LIST, DISTINCT, Absent("the addresses of the network")] = Field(
        default=None, description="The address ranges that may call the load balancer.", examples=[["10.0.0.0/8"]]
    )
    disk: Annotated[
        int | None,
        Field(ge=_SYSTEM_GIB, le=65536),
        Unit("GiB"),
        Absent("200; without instance store, at least 100 and twice the device memory"),
    ] = Field(
        default=None,
        description="The size of the root volume, gp3. An artifact takes its size twice, in the cache and unpacked: "
        "on the instance store, where the type has one and there is no warm_pool, and otherwise on this volume.",
        examples=[500],
    )
    iops: Annotated[int, Field(ge=3000, le=80000)] = Field(
        default=3000, description="The IOPS of the root volume, at most 500 per GiB.", examples=[6000]
    )
    throughput: Annotated[int, Field(ge=125, le=2000), Unit("MiB/s")] = Field(
        default=500, description="The throughput of the root volume, at most a quarter of `iops`.", examples=[1000]
    )
    compile_cache: Annotated[S3Url | None, Absent("none; the artifact has every program")] = Field(
        default=None,
        description="A prefix in S3 for the compile cache of AWS's libraries, if the server compiles: "
        "NEURON_COMPILE_CACHE_URL. Its bucket is not the store's, since instances write to it.",
        examples=["s3://my-caches/neuron"],
    )
    testers: Annotated[tuple[Cidr, ...] | None, _FEW, DISTINCT, Absent("no address")] = Field(
        default=None,
        description="The address ranges that may send requests to an environment of their choice, with the header "
        "x-nxpipe-group.",
        examples=[["10.20.3.0/28"]],
    )
    standby: Annotated[Standby | None, Absent("none")] = Field(
        default=None, description="A GPU group behind the same load balancer, as a fallback."
    )
    rehearsal: bool = Field(
        default=False,
        description="True: the fleet rehearses the procedures and may serve programs of the emulator, which no Neuron "
        "device runs. False: it serves programs of `--backend neuronx` only.",
        examples=[True],
    )

    @property
    def uses_instance_store(self) -> bool:
        """Instances of a warm pool are stopped, which empties the instance store: they keep the artifact on EBS."""
        warm = self.capacity.kind == "on-demand" and self.capacity.warm_pool is not None
        return not warm and all(INSTANCES[name].family in WITH_INSTANCE_STORE for name in self.instance_types)

    @property
    def volume_gib(self) -> int:
        """The size of the root volume. By default it holds the largest artifact that the devices can load."""
        if self.disk is not None:
            return self.disk
        if self.uses_instance_store:
            return _LEAST_GIB
        return max(_LEAST_GIB, *(_SYSTEM_GIB + 2 * INSTANCES[name].device_memory_gib for name in self.instance_types))

    @field_validator("iops")
    @classmethod
    def _iops_of_the_size(cls, iops: int, info: ValidationInfo) -> int:
        disk: int | None = info.data.get("disk")
        if disk is not None and iops > disk * _IOPS_PER_GIB:
            raise refuse(f"at most {disk * _IOPS_PER_GIB}; EBS allows {_IOPS_PER_GIB} for each GiB of `disk`")
        return iops

    @field_validator("throughput")
    @classmethod
    def _throughput_of_the_iops(cls, throughput: int, info: ValidationInfo) -> int:
        iops: int | None = info.data.get("iops")
        if iops is not None and throughput * _IOPS_PER_MIB_S > iops:
            raise refuse(
                f"at most {iops // _IOPS_PER_MIB_S}, or `iops` of at least {throughput * _IOPS_PER_MIB_S}; EBS allows "
                f"1 MiB/s for {_IOPS_PER_MIB_S} IOPS"
            )
        return throughput

    _whole = field_validator("idle_timeout", "draining")(_require_whole_seconds)

    @field_validator("draining")
    @classmethod
    def _over_before_the_block(cls, draining: timedelta, info: ValidationInfo) -> timedelta:
        capacity = info.data.get("capacity")
        if isinstance(capacity, CapacityBlock) and draining > _CUT_OFF:
            raise refuse(f'at most "{write_duration(_CUT_OFF)}": EC2 ends the instances of a block so soon after')
        return draining

    @field_validator("testers")
    @classmethod
    def _among_the_clients(cls, testers: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        clients: tuple[str, ...] = info.data.get("clients") or ()
        for tester in testers or ():
            reachable = any(IPv4Network(tester).subnet_of(IPv4Network(client)) for client in clients)
            if clients and not reachable:
                raise refuse(
                    f"ranges within clients, which may call the load balancer: {', '.join(clients)}", found=tester
                )
        return testers

    @field_validator("instance_types")
    @classmethod
    def _one_compiler_target(cls, types: tuple[str, ...]) -> tuple[str, ...]:
        targets = {INSTANCES[name].compiler_target: name for name in types}
        if len(targets) > 1:
            compiled = ", ".join(f"{name} runs programs for {target}" for target, name in targets.items())
            raise refuse(f"instance types of one compiler target: {compiled}")
        return types

    @field_validator("capacity")
    @classmethod
    def _check_capacity(cls, capacity: ServingCapacity, info: ValidationInfo) -> ServingCapacity:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        check_sold(capacity, types)
        if len(types) > 1 and capacity.kind == "on-demand" and capacity.warm_pool is not None:
            raise refuse(
                "no warm_pool, or one instance type: EC2 keeps a warm pool of a single type", found="warm_pool"
            )
        if len(types) > 1 and capacity.kind in ("reservation", "capacity-block"):
            raise refuse("one instance type; a reservation has a single type", found=f"{len(types)} types")
        if capacity.kind in ("reservation", "capacity-block") and info.data.get("zone", "") is None:
            raise refuse(
                f"`zone` in this table: a {capacity.kind} is in one availability zone, and instances in another one "
                "cannot use it",
                found="no zone",
            )
        return capacity

    @field_validator("size")
    @classmethod
    def _twice_in_a_rollout(cls, size: Size, info: ValidationInfo) -> Size:
        """Blue and green run side by side in a rollout, each with up to `max` instances."""
        reserved = getattr(info.data.get("capacity"), "instances", None)
        if reserved is not None and 2 * size.max > reserved:
            raise refuse(
                f"max of at most {reserved // 2}: a rollout runs the old and the new version side by side "
                f"(blue/green), each with up to max instances, and {reserved} are reserved; reserve {2 * size.max}, or "
                "lower max",
                found=f"max = {size.max}",
            )
        return size


_HOST_SHARE: Final = 0.06  # of a training host's memory, for the operating system and the ECS agent


class Scratch(Table):
    """An FSx for Lustre file system with the lifetime of the fleet."""

    size: Annotated[int, Field(ge=1200, le=100800), Unit("GiB")] = Field(
        description="The capacity, in steps of 1200.", examples=[1200]
    )

    @field_validator("size")
    @classmethod
    def _multiple_of_1200(cls, size: int) -> int:
        if size % 1200:
            raise refuse(f"a multiple of 1200 (GiB), such as {max(size // 1200, 1) * 1200}")
        return size


class Efa(Table):
    """AWS's installer of the EFA driver. Hosts get it from the store, below `efa/`, and check its digest."""

    version: Annotated[str, text(r"[0-9]+\.[0-9]+\.[0-9]+", 'a version of the EFA installer such as "1.49.0"')] = Field(
        description="The version of the installer.", examples=["1.49.0"]
    )
    sha256: Annotated[str, text("[0-9a-f]{64}", "the SHA-256 of the installer's .tar.gz file, in hexadecimal")] = Field(
        description="The SHA-256 of its .tar.gz file.", examples=["0" * 64]
    )

    @property
    def key(self) -> str:
        """The key of the file in the store."""
        return f"efa/aws-efa-installer-{self.version}.tar.gz"


_EFA: Final = Efa(version="1.49.0", sha256="cf2e9281a2328a243c76f911a490faed43ca0fecfe4733c25e34b2e92a32c309")


class TrainingFleet(Table):
    """Instances that train one model as a cluster."""

    kind: Literal["training"] = Field(description="The kind of fleet.", examples=["training"])
    name: _Name
    model: _ModelName
    channel: _Channel
    instance_types: Annotated[tuple[TrainingType, ...], JUST_ONE] = Field(
        description="The instance type of all nodes.", examples=[["trn1.32xlarge"]]
    )
    zone: Zone = Field(
        description="The availability zone of all nodes; collectives require one subnet.", examples=["us-east-2a"]
    )
    capacity: TrainingCapacity = Field(description="The purchase option of the instances.")
    nodes: Annotated[int, Field(ge=1, le=512), Unit("instances")] = Field(
        description="The number of nodes.", examples=[4]
    )
    image: Annotated[Image | None, Absent("a parameter of the stack, which a deployment requires")] = Field(
        default=None,
        description="The training container, pinned by digest.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/train@sha256:{'0' * 64}"],
    )
    sdk: Annotated[Sdk | None, Absent("the first version in [amis]")] = Field(
        default=None,
        description="The Neuron SDK of the training container. The driver of the locked AMI is at least as new.",
        examples=["2.32.0"],
    )
    shared_memory: Annotated[int | None, Field(ge=1), Unit("GiB"), Absent("half of the host's memory")] = Field(
        default=None,
        description="The size of /dev/shm, for data loaders and collectives. Used pages count as memory of the job.",
        examples=[64],
    )
    efa: Annotated[Efa, Absent(f"version {_EFA.version}")] = Field(
        default=_EFA, description="The EFA driver of the hosts; a fleet of one node installs none."
    )
    scratch: Annotated[Scratch | None, Absent("none")] = Field(
        default=None, description="A fast file system for data sets."
    )

    @property
    def job_memory_mib(self) -> int:
        """The memory of a job: that of its host, without the share of the operating system and the ECS agent."""
        return int(INSTANCES[self.instance_types[0]].host_memory_gib * 1024 * (1 - _HOST_SHARE))

    @property
    def shared_memory_mib(self) -> int:
        if self.shared_memory is not None:
            return self.shared_memory * 1024
        return int(INSTANCES[self.instance_types[0]].host_memory_gib * 1024) // 2

    @property
    def uses_efa(self) -> bool:
        """Collectives of one node stay on NeuronLink."""
        return self.nodes > 1

    @field_validator("shared_memory")
    @classmethod
    def _within_the_memory(cls, size: int | None, info: ValidationInfo) -> int | None:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        largest = int(INSTANCES[types[0]].host_memory_gib * (1 - _HOST_SHARE)) if types else None
        if size is not None and largest is not None and size > largest:
            raise refuse(f"at most {largest} (GiB), the memory of a job on {types[0]}")
        return size

    @field_validator("nodes")
    @classmethod
    def _require_efa(cls, nodes: int, info: ValidationInfo) -> int:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        if nodes > 1 and types and not INSTANCES[types[0]].efa_interfaces:
            raise refuse(f"1; {types[0]} has no Elastic Fabric Adapter for training on several nodes")
        return nodes

    @field_validator("capacity")
    @classmethod
    def _check_capacity(cls, capacity: TrainingCapacity, info: ValidationInfo) -> TrainingCapacity:
        check_sold(capacity, info.data.get("instance_types", ()))
        return capacity


Fleet: TypeAlias = Annotated[ServingFleet | TrainingFleet, Field(discriminator="kind")]


def serving_fleets(config: "Config") -> "dict[str, ServingFleet]":
    return {fleet.name: fleet for fleet in config.fleets if isinstance(fleet, ServingFleet)}


def serving_fleet(config: "Config", name: str, option: str) -> "ServingFleet":
    """The fleet of that name; `option` is the option or argument that holds it."""
    fleets = serving_fleets(config)
    if name not in fleets:
        hint = did_you_mean(name, fleets) or f"; there are {', '.join(fleets) or 'none'}"
        raise InputInvalid(f"{option}: nxpipe.toml has no serving fleet {name!r}{hint}")
    return fleets[name]
