"""The table [cluster]: an EKS cluster instead of fleets, its administrators, node groups and images."""

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import CORES, INSTANCES
from nxpipe.pipeline.config.capacity import CapacityBlock, ServingType, Size, TrainingCapacity, check_sold
from nxpipe.pipeline.config.kinds import DISTINCT, LIST, Cidr, Folder, Slug, Zone
from nxpipe.pipeline.config.schema import Absent, Table, refuse, text

SYSTEM: Final = "system"  # the name of the node group without accelerators, for system pods

_Admin: TypeAlias = Annotated[
    str, text(r"arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]+", "the ARN of a role", longest=1024)
]
_Version: TypeAlias = Annotated[
    str, text(r"1\.[1-9][0-9]", 'a version of Kubernetes such as "1.34", in quotes', longest=4)
]
_HostType: TypeAlias = Annotated[
    str,
    text(
        r"(?:m|c|r|t)[0-9][a-z-]*\.[0-9a-z]+",
        'an instance type without accelerators such as "m7i.large", with x86 processors',
        longest=32,
    ),
]
Mirrored: TypeAlias = Annotated[
    str,
    text(
        r"[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/[a-z0-9]+(?:[._/-]+[a-z0-9]+)*"
        r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}",
        "an image with a tag in a registry of ECR, such as"
        ' "123456789012.dkr.ecr.us-east-2.amazonaws.com/neuron-device-plugin:2.32.0.0"',
        longest=1024,
    ),
]
_REGISTRY: Final = "123456789012.dkr.ecr.us-east-2.amazonaws.com"


def _not_the_internet(cidr: str) -> str:
    if cidr.endswith("/0"):
        raise refuse("the address ranges of the callers, not the whole internet", found=f'"{cidr}"')
    return cidr


# EKS and Karpenter add their own parts to user data of several parts. The Neuron runtime reads the file.
_USER_DATA: Final = """\
MIME-Version: 1.0
Content-Type: multipart/mixed; boundary="//"

--//
Content-Type: text/x-shellscript; charset="us-ascii"

#!/bin/bash
set -e
mkdir -p /opt/aws/neuron
echo NEURON_LOGICAL_NC_CONFIG={lnc} > /opt/aws/neuron/logical_nc_config

--//--
"""


class NodeGroup(Table):
    """A node group: one instance type in one zone, as `[[cluster.groups]]`."""

    name: Slug = Field(description="The name of the group.", examples=["train"])
    instance_type: ServingType = Field(
        description="The instance type. Types with Elastic Fabric Adapters get all of their interfaces.",
        examples=["trn1.32xlarge"],
    )
    zone: Zone = Field(description="The availability zone of the nodes.", examples=["us-east-2b"])
    capacity: TrainingCapacity = Field(description="The purchase option of the instances.")
    size: Size = Field(description="The number of nodes. In a capacity block, all nodes run for its duration.")

    lnc: Annotated[Literal[1, 2] | None, Absent("the default of the instance type")] = Field(
        default=None,
        description="The Logical NeuronCore configuration: the physical cores of one logical core. Artifacts of"
        " nxpipe are compiled for the default of the instance type.",
        examples=[1],
    )

    @property
    def user_data(self) -> str:
        """What a node runs at its first boot, before it joins; empty if there is nothing to do."""
        return _USER_DATA.format(lnc=self.lnc) if self.lnc else ""

    @property
    def efa(self) -> bool:
        return bool(INSTANCES[self.instance_type].efa_interfaces)

    @property
    def near(self) -> bool:
        """True if the nodes share a cluster placement group."""
        return self.efa and not isinstance(self.capacity, CapacityBlock) and self.capacity.placement == "cluster"

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name == SYSTEM:
            raise refuse(f"another name; {SYSTEM} is the group of system nodes")
        return name

    @field_validator("capacity")
    @classmethod
    def _check_capacity(cls, capacity: TrainingCapacity, info: ValidationInfo) -> TrainingCapacity:
        type_ = info.data.get("instance_type")
        if type_ is None:
            return capacity
        check_sold(capacity, (type_,))
        placed_freely = isinstance(capacity, CapacityBlock) or capacity.placement == "none"
        if not placed_freely and "placement" in capacity.model_fields_set and not INSTANCES[type_].efa_interfaces:
            raise refuse(
                f"no placement: a {type_} has no Elastic Fabric Adapter, which a cluster placement group is for",
                found='placement = "cluster"',
            )
        return capacity

    @field_validator("lnc")
    @classmethod
    def _require_logical_cores(cls, lnc: Literal[1, 2] | None, info: ValidationInfo) -> Literal[1, 2] | None:
        type_ = info.data.get("instance_type")
        if lnc is not None and type_ is not None and CORES[INSTANCES[type_].core].lnc_default == 1:
            raise refuse(f"no lnc; a {type_} has physical cores only", found=f"lnc = {lnc}")
        return lnc

    @field_validator("size")
    @classmethod
    def _require_empty_start(cls, size: Size, info: ValidationInfo) -> Size:
        capacity = info.data.get("capacity")
        if isinstance(capacity, CapacityBlock) and (size.min or size.desired or not size.max):
            raise refuse(
                "min = 0, no desired, and max = the instances of the block: the nodes run while the block lasts",
                found=f"min = {size.min}, desired = {size.desired}, max = {size.max}",
            )
        return size


class Mirror(Table):
    """Container images of the nodes, mirrored to ECR, the only registry that a closed network reaches."""

    device_plugin: Mirrored = Field(
        description="The Neuron device plugin.", examples=[f"{_REGISTRY}/neuron-device-plugin:2.32.0.0"]
    )
    scheduler_extension: Mirrored = Field(
        description="The Neuron scheduler extension.", examples=[f"{_REGISTRY}/neuron-scheduler:2.32.0.0"]
    )
    scheduler: Mirrored = Field(
        description="The Kubernetes scheduler of the cluster's version, which the extension extends.",
        examples=[f"{_REGISTRY}/kube-scheduler:v1.34.1"],
    )
    efa_plugin: Annotated[Mirrored | None, Absent("none; no group may have Elastic Fabric Adapters")] = Field(
        default=None,
        description="The device plugin of the Elastic Fabric Adapter.",
        examples=[f"{_REGISTRY}/aws-efa-k8s-device-plugin:v0.5.20"],
    )

    monitor: Annotated[Mirrored | None, Absent("no metrics of devices")] = Field(
        default=None,
        description="neuron-monitor, which serves metrics of devices to Prometheus on port 8000 of each node's pod.",
        examples=[f"{_REGISTRY}/neuron-monitor:1.3.0"],
    )

    @property
    def all(self) -> tuple[str, ...]:
        images = (self.device_plugin, self.scheduler_extension, self.scheduler, self.efa_plugin, self.monitor)
        return tuple(image for image in images if image is not None)


class Cluster(Table):
    """An EKS cluster."""

    kubernetes: _Version = Field(description="The Kubernetes version.", examples=["1.34"])
    admins: Annotated[tuple[_Admin, ...], LIST, DISTINCT] = Field(
        description="The IAM roles with cluster administrator access. The creator of the cluster gets none.",
        examples=[["arn:aws:iam::123456789012:role/platform"]],
    )
    public: Annotated[
        tuple[Annotated[Cidr, AfterValidator(_not_the_internet)], ...] | None,
        LIST,
        DISTINCT,
        Absent("the API is private"),
    ] = Field(
        default=None,
        description="The address ranges that may call the API from outside of the network.",
        examples=[["203.0.113.0/24"]],
    )
    system_type: _HostType = Field(
        default="m7i.large",
        description="The instance type of the two nodes for system pods, such as DNS.",
        examples=["m7i.large"],
    )
    groups: Annotated[tuple[NodeGroup, ...], LIST] = Field(description="The node groups with accelerators.")
    images: Annotated[Mirror | None, Absent("`nxpipe infra manifests` is unavailable")] = Field(
        default=None, description="The container images of the manifests."
    )
    lock: Folder = Field(
        default="nxpipe.cluster.lock",
        description="The lock file of `nxpipe infra lock`, with node releases, add-on versions and digests. A"
        " relative path starts at this file.",
        examples=["nxpipe.cluster.lock"],
    )

    @field_validator("groups")
    @classmethod
    def _unique_names(cls, groups: tuple[NodeGroup, ...]) -> tuple[NodeGroup, ...]:
        names = [group.name for group in groups]
        for name in names:
            if names.count(name) > 1:
                raise refuse("groups with unique names", found=f'{names.count(name)} groups called "{name}"')
        by_type: dict[str, NodeGroup] = {}
        for group in groups:
            first = by_type.setdefault(group.instance_type, group)
            if first.lnc != group.lnc:  # Karpenter's nodes of a type have one configuration
                raise refuse(
                    f"groups of one instance type with the same lnc; {first.name} and {group.name} are of"
                    f" {group.instance_type}",
                    found=f"lnc = {first.lnc or 'none'} and {group.lnc or 'none'}",
                )
        return groups

    @field_validator("images")
    @classmethod
    def _require_efa_plugin(cls, images: Mirror | None, info: ValidationInfo) -> Mirror | None:
        efa_groups = [group.name for group in info.data.get("groups", ()) if group.efa]
        if images is not None and images.efa_plugin is None and efa_groups:
            raise refuse(f"efa_plugin as well; pods of group {efa_groups[0]} request adapters from it", found="none")
        return images
