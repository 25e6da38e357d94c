"""Serving fleets, the tables [[fleets]] of kind "serving": instances behind a load balancer."""

from datetime import timedelta
from ipaddress import IPv4Network
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.capacity import (
    WITH_INSTANCE_STORE,
    CapacityBlock,
    ServingCapacity,
    ServingType,
    Size,
    check_sold,
)
from nxpipe.pipeline.config.fleet_fields import (
    LARGEST_GIB,
    SYSTEM_GIB,
    FleetChannel,
    FleetModel,
    FleetName,
    Iops,
    Sessions,
    Throughput,
    require_iops_of_the_size,
    require_throughput_of_the_iops,
)
from nxpipe.pipeline.config.kinds import (
    DISTINCT,
    LIST,
    MAYBE_EMPTY,
    Certificate,
    Cidr,
    S3Url,
    Zone,
    duration,
    write_duration,
)
from nxpipe.pipeline.config.load_balancer import (
    HealthCheck,
    PrivateLink,
    ProbeRequest,
    TargetTracking,
    require_whole_seconds,
)
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse, text

_Service = Annotated[
    str, text(r"[A-Za-z0-9_.@-]+\.service", 'a unit of systemd such as "my-server.service"', longest=128)
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


class ChannelUpdates(Table):
    """What instances in service do when the fleet's channel serves another artifact. A fleet that follows its channel
    has no rollouts."""

    policy: Annotated[str, one_of(("none", "swap", "replace"))] = Field(
        default="none",
        description="none: they go on serving what they have; a rollout brings another version. swap: each fetches the "
        "artifact beside the old one, leaves service, and comes back with it, or with the old one if the new one "
        "fails. replace: each is terminated, and its successor fetches the artifact.",
        examples=["swap"],
    )
    interval: Annotated[timedelta, duration("1s", "1h")] = Field(
        default=timedelta(seconds=30),
        description="The mean time between two looks at the channel; each is up to half shorter or longer.",
        examples=["30s"],
    )
    max_unavailable: Annotated[int, Field(ge=1, le=1000), Unit("instances")] = Field(
        default=1,
        description="The number of instances that may be out of service at a time, for this and any other reason.",
        examples=[1],
    )

    @property
    def are_followed(self) -> bool:
        return self.policy != "none"


_CUT_OFF: Final = timedelta(minutes=15)  # between the drain of a capacity block and its first terminations
# An interface endpoint drops connections without data after this time, and cannot be set to another one.
_LINK_IDLE: Final = timedelta(seconds=350)
_LEAST_GIB: Final = 200  # of the root volume, unless `disk` is set
_FEW: Final = Field(strict=False, min_length=1, max_length=4)  # a listener rule has at most five values
_ROUTING: Final = ("least-outstanding-requests", "weighted-random")


class ServingFleet(Table):
    """Instances behind a load balancer that serve a model."""

    kind: Literal["serving"] = Field(description="The kind of fleet.", examples=["serving"])
    name: FleetName
    model: FleetModel
    channel: FleetChannel
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
    # A lifecycle hook of EC2 Auto Scaling ends after two hours, and the boot before the agent has ten minutes of them.
    ready_within: Annotated[timedelta, duration("1m", "110m")] = Field(
        default=timedelta(minutes=30),
        description="The time limit for the agent: to fetch the artifact, to start the server, and for its first "
        "successful health checks and `probe`. An instance that takes longer is replaced. EC2 Auto Scaling waits two "
        "hours at most, with the boot.",
        examples=["30m"],
    )
    scaling: Annotated[TargetTracking | None, Absent("none; people and rollouts set the number of instances")] = Field(
        default=None, description="Automatic scaling by the number of requests."
    )
    command: Annotated[tuple[_Word, ...] | None, MAYBE_EMPTY, Absent("`nxpipe serve`")] = Field(
        default=None,
        description="The command line of the server, as a list. NXPIPE_ARTIFACT is the artifact's folder. [] for none: "
        "the agent exits once the artifact is in place, and a unit of the AMI serves it.",
        examples=[["python", "-m", "server"]],
    )
    updates: ChannelUpdates = Field(
        default_factory=ChannelUpdates, description="What instances do when the fleet's channel changes."
    )
    golden_inputs: bool = Field(
        default=True,
        description="True: before the server starts, the agent runs the inputs of the artifact's evidence on every "
        "core, and compares the answers. False: an instance that computes wrong answers is not noticed before it "
        "serves.",
        examples=[False],
    )
    probe: Annotated[ProbeRequest | None, Absent("the health check only")] = Field(
        default=None, description="A request that the server answers before the instance goes into service."
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
        Field(ge=SYSTEM_GIB, le=LARGEST_GIB),
        Unit("GiB"),
        Absent("200; without instance store, at least 100 and twice the device memory"),
    ] = Field(
        default=None,
        description="The size of the root volume, gp3. An artifact takes its size twice, in the cache and unpacked: "
        "on the instance store, where the type has one and there is no warm_pool, and otherwise on this volume.",
        examples=[500],
    )
    iops: Iops = 3000
    throughput: Throughput = 500
    compile_cache: Annotated[S3Url | None, Absent("none; the artifact has every program")] = Field(
        default=None,
        description="A prefix in S3 for the compile cache of AWS's libraries, if the server compiles: "
        "NEURON_COMPILE_CACHE_URL. Its bucket is not the store's, since instances write to it.",
        examples=["s3://my-caches/neuron"],
    )
    private_link: Annotated[PrivateLink | None, Absent("only callers with a route to the network")] = Field(
        default=None,
        description="An endpoint service, for callers in networks without a route. `idle_timeout` is at most 350s.",
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
    log_units: Annotated[tuple[_Service, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(),
        description="Further units whose journal goes to the fleet's log group, such as the AMI's own unit of the "
        "server. Those of nxpipe always do.",
        examples=[["my-server.service"]],
    )
    ssm: Sessions = False
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
        times = 4 if self.updates.policy == "swap" else 2  # an artifact is in the cache and unpacked
        return max(
            _LEAST_GIB, *(SYSTEM_GIB + times * INSTANCES[name].device_memory_gib for name in self.instance_types)
        )

    _iops_of_the_size = field_validator("iops")(require_iops_of_the_size)
    _throughput_of_the_iops = field_validator("throughput")(require_throughput_of_the_iops)

    @field_validator("private_link")
    @classmethod
    def _no_longer_idle_than_an_endpoint(cls, link: PrivateLink | None, info: ValidationInfo) -> PrivateLink | None:
        idle: timedelta | None = info.data.get("idle_timeout")
        if link is not None and idle is not None and idle > _LINK_IDLE:
            raise refuse('none, or idle_timeout of at most "350s": PrivateLink drops idle connections then')
        return link

    _whole = field_validator("idle_timeout", "draining")(require_whole_seconds)

    @field_validator("draining")
    @classmethod
    def _over_before_the_block(cls, draining: timedelta, info: ValidationInfo) -> timedelta:
        capacity = info.data.get("capacity")
        if isinstance(capacity, CapacityBlock) and draining > _CUT_OFF:
            raise refuse(f'at most "{write_duration(_CUT_OFF)}": EC2 ends the instances of a block so soon after')
        return draining

    @field_validator("probe")
    @classmethod
    def _of_our_server(cls, probe: ProbeRequest | None, info: ValidationInfo) -> ProbeRequest | None:
        if probe is not None and info.data.get("command") == ():
            raise refuse(
                "`command` in the same table: the agent sends the probe to a server that it starts", found="no command"
            )
        return probe

    @field_validator("updates")
    @classmethod
    def _leaving_some_in_service(cls, updates: ChannelUpdates, info: ValidationInfo) -> ChannelUpdates:
        if not updates.are_followed:
            return updates
        size, scaling = (info.data.get(name) for name in ("size", "scaling"))
        if info.data.get("command", None) == ():
            raise refuse(
                'policy = "none", or a server that the agent runs: with `command = []` the agent has ended',
                found=f'policy = "{updates.policy}"',
            )
        if size is not None and updates.max_unavailable >= (least := size.min if scaling else size.desired):
            name = "size.min" if scaling else "size.desired"
            raise refuse(
                f"max_unavailable below {name}, which is {least}: otherwise no instance may be in service during an "
                "update; raise the size, or release by rollouts",
                found=f"max_unavailable = {updates.max_unavailable}",
            )
        return updates

    @field_validator("testers")
    @classmethod
    def _among_the_clients(cls, testers: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        updates: ChannelUpdates | None = info.data.get("updates")
        if testers and updates is not None and updates.are_followed:
            raise refuse(
                f'no testers, or updates.policy = "none": with "{updates.policy}" the fleet has no rollouts, and no '
                "second environment to test",
                found=testers[0],
            )
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
                f"`zone` in the fleet's table, beside `capacity`: a {capacity.kind} is in one availability zone, and "
                "instances in another one cannot use it",
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

    @field_validator("scaling")
    @classmethod
    def _able_to_scale(cls, scaling: TargetTracking | None, info: ValidationInfo) -> TargetTracking | None:
        size, capacity, limit = (info.data.get(name) for name in ("size", "capacity", "ready_within"))
        if scaling is None:
            return None
        if isinstance(capacity, CapacityBlock):
            raise refuse("no scaling: the instances of a capacity block are paid until its end", found="scaling")
        if size is not None and not size.min:
            raise refuse(
                "size.min of at least 1: a target group without instances has no requests per target, so a fleet that "
                "has none never gets one; omit scaling for a fleet that people start and stop",
                found="size.min = 0",
            )
        if size is not None and size.min == size.max:
            raise refuse("size.max above size.min, or no scaling", found=f"size.min = size.max = {size.max}")
        if limit is not None and scaling.warm_up > limit:
            raise refuse(
                f'warm_up of at most ready_within, "{write_duration(limit)}"',
                found=f'warm_up = "{write_duration(scaling.warm_up)}"',
            )
        return scaling
