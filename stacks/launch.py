"""Launch templates of accelerator instances, derived from the instance catalogue.

Written with L1 constructs: the L2 launch template supports neither EFA interfaces nor capacity blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from aws_cdk import Fn, aws_ec2, aws_iam
from constructs import Construct

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.fleets import Capacity

Template: TypeAlias = aws_ec2.CfnLaunchTemplate
_Interface: TypeAlias = aws_ec2.CfnLaunchTemplate.NetworkInterfaceProperty
_TAGGED: Final = ("instance", "volume", "network-interface")


@dataclass(frozen=True)
class Machine:
    """What its instances run, and as whom."""

    name: str
    image: str | None  # None: EKS chooses by the release of its group
    profile: aws_iam.CfnInstanceProfile | None  # None: EKS makes one, and refuses any other
    groups: Sequence[aws_ec2.ISecurityGroup]
    user_data: str
    root_device: str = "/dev/sda1"  # of Ubuntu's images, and so of the Neuron ones that we lock
    root_gib: int = 200  # the image has 100 of libraries, and an artifact comes beside its cached objects
    # Its containers' way to the metadata service is one hop longer, and its tags have slashes, which that one refuses.
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
    """Without an instance type the group that uses the template says which. `efa`: the instances train together."""
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
        metadata_options=_metadata(machine),
        block_device_mappings=[_root(machine)],
        monitoring=Template.MonitoringProperty(enabled=True),
        tag_specifications=_tagged(machine),
        user_data=Fn.base64(machine.user_data) if machine.user_data else None,
        placement=Template.PlacementProperty(group_name=machine.near.ref) if machine.near else None,
        **network,
        **_bought(capacity),
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
    """One for each network card: the first carries the instance's address, the others nothing but EFA traffic, so that
    they take no address of the subnet. Security groups belong inside; a subnet does not, for the group chooses it.
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


def _bought(capacity: Capacity | None) -> dict[str, Any]:
    """On demand takes no word of the template; spot is said by the group, beside how much of it is on demand."""
    if capacity is None or capacity.kind not in ("reservation", "capacity-block"):
        return {}
    target = Template.CapacityReservationTargetProperty(capacity_reservation_id=capacity.id)
    found: dict[str, Any] = {
        "capacity_reservation_specification": Template.CapacityReservationSpecificationProperty(
            capacity_reservation_target=target
        )
    }
    if capacity.kind == "capacity-block":
        found["instance_market_options"] = Template.InstanceMarketOptionsProperty(market_type="capacity-block")
    return found


def _metadata(machine: Machine) -> aws_ec2.CfnLaunchTemplate.MetadataOptionsProperty:
    """Tags are in it where they may be, for the agent asks which group it belongs to."""
    return Template.MetadataOptionsProperty(
        http_endpoint="enabled",
        http_tokens="required",
        http_put_response_hop_limit=2 if machine.kubernetes else 1,
        instance_metadata_tags="disabled" if machine.kubernetes else "enabled",
    )


def _root(machine: Machine) -> aws_ec2.CfnLaunchTemplate.BlockDeviceMappingProperty:
    disk = Template.EbsProperty(
        volume_type="gp3", volume_size=machine.root_gib, encrypted=True, delete_on_termination=True
    )
    return Template.BlockDeviceMappingProperty(device_name=machine.root_device, ebs=disk)


def _tagged(machine: Machine) -> list[aws_ec2.CfnLaunchTemplate.TagSpecificationProperty]:
    tags = [{"key": key, "value": value} for key, value in {"Name": machine.name, **machine.tags}.items()]
    return [Template.TagSpecificationProperty(resource_type=kind, tags=tags) for kind in _TAGGED]
