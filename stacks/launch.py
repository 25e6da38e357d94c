"""Launch templates of accelerator instances, derived from the instance catalogue.

Written with L1 constructs: the L2 launch template supports neither EFA interfaces nor capacity blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aws_cdk import Fn, aws_ec2, aws_iam
from constructs import Construct

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.capacity import Capacity

Template: TypeAlias = aws_ec2.CfnLaunchTemplate
_Interface: TypeAlias = aws_ec2.CfnLaunchTemplate.NetworkInterfaceProperty
_TAGGED_RESOURCES: Final = ("instance", "volume", "network-interface")


@dataclass(frozen=True)
class Machine:
    """Instance settings that do not depend on the instance type."""

    name: str
    image: str | None  # None: EKS chooses it by the node group's release
    profile: aws_iam.CfnInstanceProfile | None  # None: EKS creates it, and accepts no other
    groups: Sequence[aws_ec2.ISecurityGroup]
    user_data: str
    root_device: str = "/dev/sda1"  # as in Ubuntu images, including the locked Neuron images
    root_gib: int = 200
    root_iops: int | None = None  # None: those that every gp3 volume has, 3000 IOPS and 125 MiB/s
    root_throughput: int | None = None  # MiB/s
    # Pods need a second hop to the metadata service. Their nodes' tags have slashes, which it does not support.
    kubernetes: bool = False
    near: aws_ec2.CfnPlacementGroup | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


def launch_template(
    scope: Construct,
    id_: str,
    machine: Machine,
    *,
    instance_type: str | None,
    capacity: Capacity | None = None,
    efa: bool = False,
) -> Template:
    """Launch template. Without an instance type, the group that uses it chooses. `efa` adds EFA network interfaces."""
    groups = [group.security_group_id for group in machine.groups]
    if efa and instance_type is not None:
        network: dict[str, Any] = {"network_interfaces": efa_interfaces(instance_type, groups)}
    else:
        network = {"security_group_ids": groups}
    data = Template.LaunchTemplateDataProperty(
        image_id=machine.image,
        instance_type=instance_type,
        iam_instance_profile=Template.IamInstanceProfileProperty(arn=machine.profile.attr_arn)
        if machine.profile
        else None,
        metadata_options=_metadata_options(machine),
        block_device_mappings=[_root_volume(machine)],
        monitoring=Template.MonitoringProperty(enabled=True),
        tag_specifications=tag_specifications(machine.name, machine.tags),
        user_data=Fn.base64(machine.user_data) if machine.user_data else None,
        placement=Template.PlacementProperty(group_name=machine.near.ref) if machine.near else None,
        **network,
        **_purchase_options(capacity),
    )
    return Template(
        scope,
        id_,
        launch_template_name=machine.name,
        launch_template_data=data,
        tag_specifications=[
            Template.LaunchTemplateTagSpecificationProperty(
                resource_type="launch-template", tags=[{"key": "Name", "value": machine.name}]
            )
        ],
    )


def efa_interfaces(instance_type: str, groups: Sequence[str]) -> list[_Interface]:
    """One network interface per network card.

    The first has the instance's IP address. The others carry EFA traffic only, and use no address of the subnet.
    Security groups are listed per interface; the subnet is not, because the group chooses it.
    """
    cards = INSTANCES[instance_type].efa_interfaces or 0
    return [
        Template.NetworkInterfaceProperty(
            network_card_index=card,
            device_index=min(card, 1),
            interface_type="efa-only" if card else "efa",
            groups=list(groups),
            delete_on_termination=True,
        )
        for card in range(cards)
    ]


def _purchase_options(capacity: Capacity | None) -> dict[str, Any]:
    """Settings for reserved capacity. On-demand needs none, and spot is a setting of the group."""
    if capacity is None or capacity.kind not in ("reservation", "capacity-block"):
        return {}
    target = Template.CapacityReservationTargetProperty(capacity_reservation_id=capacity.id)
    options: dict[str, Any] = {
        "capacity_reservation_specification": Template.CapacityReservationSpecificationProperty(
            capacity_reservation_target=target
        )
    }
    if capacity.kind == "capacity-block":
        options["instance_market_options"] = Template.InstanceMarketOptionsProperty(market_type="capacity-block")
    return options


def _metadata_options(machine: Machine) -> aws_ec2.CfnLaunchTemplate.MetadataOptionsProperty:
    """IMDSv2 settings. Instance tags are enabled where possible: the agent reads the name of its group from them."""
    return Template.MetadataOptionsProperty(
        http_endpoint="enabled",
        http_tokens="required",
        http_put_response_hop_limit=2 if machine.kubernetes else 1,
        instance_metadata_tags="disabled" if machine.kubernetes else "enabled",
    )


def _root_volume(machine: Machine) -> aws_ec2.CfnLaunchTemplate.BlockDeviceMappingProperty:
    disk = Template.EbsProperty(
        volume_type="gp3",
        volume_size=machine.root_gib,
        iops=machine.root_iops,
        throughput=machine.root_throughput,
        encrypted=True,
        delete_on_termination=True,
    )
    return Template.BlockDeviceMappingProperty(device_name=machine.root_device, ebs=disk)


def tag_specifications(name: str, tags: Mapping[str, str]) -> list[aws_ec2.CfnLaunchTemplate.TagSpecificationProperty]:
    """Tags of an instance and of what it is billed with: the tags of its group do not reach volumes and interfaces."""
    pairs = [{"key": key, "value": value} for key, value in {"Name": name, **tags}.items()]
    return [Template.TagSpecificationProperty(resource_type=kind, tags=pairs) for kind in _TAGGED_RESOURCES]
