"""Training fleets, the tables [[fleets]] of kind "training": instances that train one model as a cluster."""

from typing import Annotated, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.capacity import (
    WITH_INSTANCE_STORE,
    TrainingCapacity,
    TrainingType,
    check_sold,
    job_memory_mib,
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
from nxpipe.pipeline.config.kinds import JUST_ONE, Image, Sdk, Zone
from nxpipe.pipeline.config.schema import Absent, Table, Unit, refuse, text


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
    name: FleetName
    model: FleetModel
    channel: FleetChannel
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
    disk: Annotated[int, Field(ge=SYSTEM_GIB, le=LARGEST_GIB), Unit("GiB")] = Field(
        default=500,
        description="The size of the root volume, gp3: the training container and its temporary files.",
        examples=[1000],
    )
    iops: Iops = 3000
    throughput: Throughput = 500
    scratch: Annotated[Scratch | None, Absent("none")] = Field(
        default=None, description="A fast file system for data sets."
    )
    ssm: Sessions = False

    @property
    def job_memory_mib(self) -> int:
        return job_memory_mib(self.instance_types[0])

    @property
    def shared_memory_mib(self) -> int:
        if self.shared_memory is not None:
            return self.shared_memory * 1024
        return int(INSTANCES[self.instance_types[0]].host_memory_gib * 1024) // 2

    @property
    def has_instance_store(self) -> bool:
        return INSTANCES[self.instance_types[0]].family in WITH_INSTANCE_STORE

    @property
    def uses_efa(self) -> bool:
        """Collectives of one node stay on NeuronLink."""
        return self.nodes > 1

    _iops_of_the_size = field_validator("iops")(require_iops_of_the_size)
    _throughput_of_the_iops = field_validator("throughput")(require_throughput_of_the_iops)

    @field_validator("shared_memory")
    @classmethod
    def _within_the_memory(cls, size: int | None, info: ValidationInfo) -> int | None:
        types: tuple[str, ...] = info.data.get("instance_types", ())
        largest = job_memory_mib(types[0]) // 1024 if types else None
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
