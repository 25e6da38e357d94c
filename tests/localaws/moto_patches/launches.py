"""Launch templates, and the settings that instances inherit from them. Moto's instances inherit only user data and
type: no profile, metadata options, interfaces, placement or market, and only from the first version."""

import os
from collections.abc import Mapping
from typing import Any, Final

from moto.ec2.exceptions import EC2ClientError, InvalidParameterCombination
from moto.ec2.models.instances import Instance, InstanceBackend, Reservation
from moto.ec2.models.launch_templates import LaunchTemplate, LaunchTemplateBackend, LaunchTemplateVersion
from moto.ec2.utils import filter_iam_instance_profiles, parse_user_data, random_eni_attach_id
from moto.ssm import ssm_backends

from tests.localaws.moto_patches._around import around
from tests.localaws.moto_patches.capacity import known_placement_group, take

_FROM_SSM: Final = "resolve:ssm:"
_CARD: Final = 100  # moto has one network card; interfaces of further cards get indices from here


def _create_launch_template(
    stock: Any, self: Any, name: str, description: str, data: dict[str, Any], tag_spec: dict[str, Any]
) -> LaunchTemplate:
    """Create a template without its own tags in its data, where moto writes them."""
    tag_specifications = [
        specification
        for specification in data.get("TagSpecifications", [])
        if specification.get("ResourceType") != "launch-template"
    ]
    content = {key: value for key, value in data.items() if key != "TagSpecifications"}
    template: LaunchTemplate = stock(
        self,
        name,
        description,
        content | ({"TagSpecifications": tag_specifications} if tag_specifications else {}),
        tag_spec,
    )
    return template


def _create_version(stock: Any, self: LaunchTemplate, data: dict[str, Any], description: str) -> LaunchTemplateVersion:
    if isinstance(data.get("UserData"), str):
        data = {**data, "UserData": parse_user_data(data["UserData"])}
    version: LaunchTemplateVersion = stock(
        self, {key: value for key, value in data.items() if value is not None}, description
    )
    return version


def _run_instances(
    stock: Any, self: Any, image_id: str, count: int, user_data: Any, security_group_names: list[str], **kwargs: Any
) -> Reservation:
    chosen = kwargs.get("launch_template")
    data = self._get_template_from_args(chosen).data if chosen else {}
    if data.get("NetworkInterfaces") and (data.get("SecurityGroupIds") or data.get("SecurityGroups")):
        raise InvalidParameterCombination(
            "Network interfaces and an instance-level security groups may not be specified on the same request"
        )
    kwargs = _inherited(data, kwargs)
    image = resolved_image(self, image_id or data.get("ImageId", ""))
    profile, reserved = data.get("IamInstanceProfile", {}), _reservation(data)
    if profile:
        _profile(self, profile)
    if group := data.get("Placement", {}).get("GroupName"):
        known_placement_group(self, group)
    if reserved:
        by_template = data.get("InstanceType") if kwargs.get("is_instance_type_default") else None
        take(self, reserved, by_template or kwargs["instance_type"], _zone(self, kwargs), count)
    reservation: Reservation = stock(self, image, count, user_data, security_group_names, **kwargs)
    for instance in reservation.instances:
        _apply_template(self, instance, data, reserved)
        if profile and instance.id not in self.iam_instance_profile_associations:
            association = {f"iam_instance_profile_{key.lower()}": value for key, value in profile.items()}
            self.associate_iam_instance_profile(instance.id, **association)
    return reservation


def _inherited(data: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the request, completed from the template."""
    merged = dict(kwargs)
    if not merged.get("metadata_options"):
        merged["metadata_options"] = data.get("MetadataOptions", {})
    if "block_device_mappings" not in merged and data.get("BlockDeviceMappings"):
        merged["block_device_mappings"] = data["BlockDeviceMappings"]
    if not merged.get("nics"):
        merged["nics"] = [interface for interface in data.get("NetworkInterfaces", []) if _is_first_card(interface)]
    if data.get("Monitoring", {}).get("Enabled"):
        merged["monitoring_state"] = "enabled"
    merged["ebs_optimized"] = merged.get("ebs_optimized") or data.get("EbsOptimized", False)
    return merged


def _is_first_card(interface: Mapping[str, Any]) -> bool:
    return int(interface.get("NetworkCardIndex", 0)) == 0


def _apply_template(backend: Any, instance: Instance, data: Mapping[str, Any], reserved: str | None) -> None:
    instance.placement.group_name = data.get("Placement", {}).get("GroupName", instance.placement.group_name)
    instance.placement.tenancy = data.get("Placement", {}).get("Tenancy", instance.placement.tenancy)
    if market := data.get("InstanceMarketOptions", {}).get("MarketType"):
        instance.lifecycle = market
    if reserved:
        instance.capacity_reservation_id = reserved
    for interface in data.get("NetworkInterfaces", []):
        if not _is_first_card(interface):
            _attach(backend, instance, interface)
        elif (attached := instance.nics.get(int(interface["DeviceIndex"]))) is not None:
            attached.interface_type = interface.get("InterfaceType", "interface")


def _attach(backend: Any, instance: Instance, interface: Mapping[str, Any]) -> None:
    card, device = int(interface["NetworkCardIndex"]), int(interface["DeviceIndex"])
    eni = backend.create_network_interface(
        instance.subnet_id,
        None,
        device_index=device,
        group_ids=interface.get("Groups", []),
        delete_on_termination=True,
        description=interface.get("Description"),
    )
    instance.attach_eni(eni, _CARD * card + device)
    eni.device_index, eni.attachment_id = device, random_eni_attach_id()
    eni.interface_type, eni.network_card_index = interface.get("InterfaceType", "interface"), card


def _reservation(data: Mapping[str, Any]) -> str | None:
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    capacity_reservation_id: str | None = target.get("CapacityReservationId")
    return capacity_reservation_id


def _zone(backend: Any, kwargs: Mapping[str, Any]) -> str | None:
    subnet = kwargs.get("subnet_id")
    zone: str | None = backend.get_subnet(subnet).availability_zone if subnet else kwargs.get("placement")
    return zone


def _profile(backend: Any, profile: Mapping[str, str]) -> None:
    filter_iam_instance_profiles(backend.account_id, backend.partition, profile.get("Arn"), profile.get("Name"))


def resolved_image(backend: Any, image: str) -> str:
    """The image; `resolve:ssm:` is resolved at each launch."""
    if not image.startswith(_FROM_SSM):
        return image
    name = image.removeprefix(_FROM_SSM)
    response = ssm_backends[backend.account_id][backend.region_name].get_parameter(name)
    if response is None:
        raise EC2ClientError("InvalidParameterValue", f"Systems Manager has no parameter {name} for an AMI.")
    value: str = response.value
    return value


def apply() -> None:
    os.environ.setdefault(
        "MOTO_EC2_LOAD_DEFAULT_AMIS", "false"
    )  # else moto loads a thousand old images in each region at each reset
    around(LaunchTemplateBackend, "create_launch_template", _create_launch_template)
    around(LaunchTemplate, "create_version", _create_version)
    # moto returns the tags as they were at creation
    LaunchTemplate.tags = property(lambda self: self.get_tags(), lambda self, value: None)
    around(InstanceBackend, "run_instances", _run_instances)
