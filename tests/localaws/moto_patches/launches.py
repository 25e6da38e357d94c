"""Launch templates, and what instances inherit from them. Moto starts instances that know nothing of their template
but its user data and its type: no profile, no metadata options, no interfaces, no placement, no market, and never a
version behind the first one.
"""

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
_CARD: Final = 100  # interfaces of further cards stand behind those of the first; moto knows one card only


def _create_launch_template(
    stock: Any, self: Any, name: str, description: str, data: dict[str, Any], tag_spec: dict[str, Any]
) -> LaunchTemplate:
    """Without the tags of the template itself, which moto writes into its data."""
    kept = [each for each in data.get("TagSpecifications", []) if each.get("ResourceType") != "launch-template"]
    rest = {key: value for key, value in data.items() if key != "TagSpecifications"}
    made: LaunchTemplate = stock(
        self, name, description, rest | ({"TagSpecifications": kept} if kept else {}), tag_spec
    )
    return made


def _create_version(stock: Any, self: LaunchTemplate, data: dict[str, Any], description: str) -> LaunchTemplateVersion:
    if isinstance(data.get("UserData"), str):
        data = {**data, "UserData": parse_user_data(data["UserData"])}
    made: LaunchTemplateVersion = stock(
        self, {key: each for key, each in data.items() if each is not None}, description
    )
    return made


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
    made: Reservation = stock(self, image, count, user_data, security_group_names, **kwargs)
    for one in made.instances:
        _settle(self, one, data, reserved)
        if profile and one.id not in self.iam_instance_profile_associations:
            given = {f"iam_instance_profile_{key.lower()}": value for key, value in profile.items()}
            self.associate_iam_instance_profile(one.id, **given)
    return made


def _inherited(data: Mapping[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What the request does not say itself."""
    found = dict(kwargs)
    if not found.get("metadata_options"):
        found["metadata_options"] = data.get("MetadataOptions", {})
    if "block_device_mappings" not in found and data.get("BlockDeviceMappings"):
        found["block_device_mappings"] = data["BlockDeviceMappings"]
    if not found.get("nics"):
        found["nics"] = [each for each in data.get("NetworkInterfaces", []) if _is_first_card(each)]
    if data.get("Monitoring", {}).get("Enabled"):
        found["monitoring_state"] = "enabled"
    found["ebs_optimized"] = found.get("ebs_optimized") or data.get("EbsOptimized", False)
    return found


def _is_first_card(interface: Mapping[str, Any]) -> bool:
    return int(interface.get("NetworkCardIndex", 0)) == 0


def _settle(backend: Any, one: Instance, data: Mapping[str, Any], reserved: str | None) -> None:
    one.placement.group_name = data.get("Placement", {}).get("GroupName", one.placement.group_name)
    one.placement.tenancy = data.get("Placement", {}).get("Tenancy", one.placement.tenancy)
    if market := data.get("InstanceMarketOptions", {}).get("MarketType"):
        one.lifecycle = market
    if reserved:
        one.capacity_reservation_id = reserved
    for interface in data.get("NetworkInterfaces", []):
        if not _is_first_card(interface):
            _attach(backend, one, interface)
        elif (made := one.nics.get(int(interface["DeviceIndex"]))) is not None:
            made.interface_type = interface.get("InterfaceType", "interface")


def _attach(backend: Any, one: Instance, interface: Mapping[str, Any]) -> None:
    card, device = int(interface["NetworkCardIndex"]), int(interface["DeviceIndex"])
    made = backend.create_network_interface(
        one.subnet_id,
        None,
        device_index=device,
        group_ids=interface.get("Groups", []),
        delete_on_termination=True,
        description=interface.get("Description"),
    )
    one.attach_eni(made, _CARD * card + device)
    made.device_index, made.attachment_id = device, random_eni_attach_id()
    made.interface_type, made.network_card_index = interface.get("InterfaceType", "interface"), card


def _reservation(data: Mapping[str, Any]) -> str | None:
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    found: str | None = target.get("CapacityReservationId")
    return found


def _zone(backend: Any, kwargs: Mapping[str, Any]) -> str | None:
    subnet = kwargs.get("subnet_id")
    zone: str | None = backend.get_subnet(subnet).availability_zone if subnet else kwargs.get("placement")
    return zone


def _profile(backend: Any, given: Mapping[str, str]) -> None:
    filter_iam_instance_profiles(backend.account_id, backend.partition, given.get("Arn"), given.get("Name"))


def resolved_image(backend: Any, image: str) -> str:
    """`resolve:ssm:` is read anew at every launch."""
    if not image.startswith(_FROM_SSM):
        return image
    name = image.removeprefix(_FROM_SSM)
    found = ssm_backends[backend.account_id][backend.region_name].get_parameter(name)
    if found is None:
        raise EC2ClientError("InvalidParameterValue", f"Systems Manager has no parameter {name} for an AMI.")
    value: str = found.value
    return value


def mend() -> None:
    os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # a thousand old images in each region, at each reset
    around(LaunchTemplateBackend, "create_launch_template", _create_launch_template)
    around(LaunchTemplate, "create_version", _create_version)
    # moto tells the tags of the day it was made
    LaunchTemplate.tags = property(lambda self: self.get_tags(), lambda self, value: None)
    around(InstanceBackend, "run_instances", _run_instances)
