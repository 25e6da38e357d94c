"""Placement groups, capacity reservations and capacity blocks, which moto does not have.

A block is a reservation with a window: before the window its state is scheduled, after it expired, and instances start
in neither state. Offerings cost nothing here.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses import EC2Response
from moto.ec2.utils import EC2_RESOURCE_TO_PREFIX

_Record = dict[str, Any]
_BEGINS: Final = time(11, 30, tzinfo=UTC)  # start and end time of blocks
_IN_BLOCKS: Final = (
    "trn1.32xlarge",
    "trn2.3xlarge",
    "trn2.48xlarge",
    "trn2u.48xlarge",
)  # inf2 and trn1n are not offered in blocks


def now() -> datetime:
    return datetime.now(UTC)


def _time(value: datetime) -> datetime:
    """The time with a zone; moto parses times without one, and they are in UTC."""
    return value if value.tzinfo else value.replace(tzinfo=UTC)


def placement_groups(backend: Any) -> dict[str, _Record]:
    """The records, stored on moto's backend so that a reset of moto removes them, too."""
    records: dict[str, _Record] = vars(backend).setdefault("placement_groups", {})
    return records


def reservations(backend: Any) -> dict[str, _Record]:
    records: dict[str, _Record] = vars(backend).setdefault("capacity_reservations", {})
    return records


def _offers(backend: Any) -> dict[str, _Record]:
    records: dict[str, _Record] = vars(backend).setdefault("capacity_block_offers", {})
    return records


def state_of(reservation: Mapping[str, Any]) -> str:
    if reservation["State"] == "cancelled":
        return "cancelled"
    if reservation["StartDate"] > now():
        return "scheduled"
    return "expired" if reservation.get("EndDate") and _time(reservation["EndDate"]) <= now() else "active"


def taken(backend: Any, id_: str) -> int:
    running = (instance for instance in backend.all_instances() if instance.state in ("pending", "running"))
    return sum(getattr(instance, "capacity_reservation_id", None) == id_ for instance in running)


def take(backend: Any, id_: str, instance_type: str, zone: str | None, count: int) -> None:
    """Raise as EC2 does if the reservation is for other instances, is not active or has too few instances left."""
    reservation = _known(backend, id_)
    if (state := state_of(reservation)) != "active":
        raise EC2ClientError("InvalidCapacityReservationState", f"Capacity Reservation {id_} is in state {state}.")
    for name, requested in (("InstanceType", instance_type), ("AvailabilityZone", zone)):
        if reservation[name] != requested:
            raise EC2ClientError(
                "InvalidParameterValue", f"{id_} is of {name} {reservation[name]}, and not of {requested}."
            )
    free = reservation["TotalInstanceCount"] - taken(backend, id_)
    if count > free:
        raise EC2ClientError("ReservationCapacityExceeded", f"{id_} has {free} instances left; {count} were requested.")


def _known(backend: Any, id_: str) -> _Record:
    if id_ not in reservations(backend):
        raise EC2ClientError("InvalidCapacityReservationId.NotFound", f"The capacity reservation {id_} is not found.")
    return reservations(backend)[id_]


def _describe(backend: Any, reservation: _Record) -> _Record:
    free = reservation["TotalInstanceCount"] - taken(backend, reservation["CapacityReservationId"])
    tags = _tags(backend, reservation["CapacityReservationId"])
    return {**reservation, "State": state_of(reservation), "AvailableInstanceCount": free, "Tags": tags}


def _tags(backend: Any, id_: str) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in backend.tags.get(id_, {}).items()]


def _matching(records: Iterable[_Record], filters: Mapping[str, list[str]]) -> list[_Record]:
    names = {name: "".join(part.capitalize() for part in name.split("-")) for name in filters}
    return [record for record in records if all(str(record.get(names[name])) in filters[name] for name in filters)]


def _id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(9)[:17]}"


# The calls, as EC2 names them


def create_placement_group(self: EC2Response) -> ActionResult:
    groups, name = placement_groups(self.ec2_backend), self._get_param("GroupName")
    if name in groups:
        raise EC2ClientError("InvalidPlacementGroup.Duplicate", f"The placement group '{name}' already exists.")
    id_, strategy = _id("pg"), self._get_param("Strategy", "cluster")
    arn = f"arn:{self.partition}:ec2:{self.region}:{self.current_account}:placement-group/{name}"
    groups[name] = {"GroupName": name, "GroupId": id_, "GroupArn": arn, "State": "available", "Strategy": strategy}
    if strategy == "partition":
        groups[name]["PartitionCount"] = self._get_int_param("PartitionCount", 7)
    if strategy == "spread":
        groups[name]["SpreadLevel"] = self._get_param("SpreadLevel", "rack")
    self.ec2_backend.create_tags([id_], self._parse_tag_specification().get("placement-group", {}))
    return ActionResult({"PlacementGroup": {**groups[name], "Tags": _tags(self.ec2_backend, id_)}})


def describe_placement_groups(self: EC2Response) -> ActionResult:
    groups = placement_groups(self.ec2_backend)
    names = self._get_param("GroupNames", [])
    selected = [known_placement_group(self.ec2_backend, name) for name in names] or list(groups.values())
    descriptions = [{**group, "Tags": _tags(self.ec2_backend, group["GroupId"])} for group in selected]
    return ActionResult({"PlacementGroups": _matching(descriptions, self._filters_from_querystring())})


def delete_placement_group(self: EC2Response) -> ActionResult:
    name = self._get_param("GroupName")
    group = known_placement_group(self.ec2_backend, name)
    members = [instance for instance in self.ec2_backend.all_instances() if instance.placement.group_name == name]
    if any(instance.state != "terminated" for instance in members):
        raise EC2ClientError("InvalidPlacementGroup.InUse", f"The placement group {name} is in use.")
    del placement_groups(self.ec2_backend)[name]
    self.ec2_backend.tags.pop(group["GroupId"], None)
    return EmptyResult()


def known_placement_group(backend: Any, name: str) -> _Record:
    if name not in placement_groups(backend):
        raise EC2ClientError("InvalidPlacementGroup.Unknown", f"The placement group '{name}' is unknown.")
    return placement_groups(backend)[name]


def create_capacity_reservation(self: EC2Response) -> ActionResult:
    required = {name: self._get_param(name) for name in ("AvailabilityZone", "InstancePlatform", "InstanceType")}
    optional = ("EndDate", "EphemeralStorage", "EbsOptimized", "PlacementGroupArn")
    optional_values = {name: self._get_param(name) for name in optional}
    defaults = {"EndDateType": "unlimited", "InstanceMatchCriteria": "open", "Tenancy": "default"}
    reservation = _reserve(
        self,
        self._get_int_param("InstanceCount"),
        **required,
        **{name: value for name, value in optional_values.items() if value is not None},
        **{name: self._get_param(name, value) for name, value in defaults.items()},
        StartDate=now(),
        ReservationType="default",
    )
    return ActionResult({"CapacityReservation": _describe(self.ec2_backend, reservation)})


def _reserve(self: EC2Response, count: int, **fields: Any) -> _Record:
    id_ = _id("cr")
    arn = f"arn:{self.partition}:ec2:{self.region}:{self.current_account}:capacity-reservation/{id_}"
    reservation = {
        "CapacityReservationId": id_,
        "CapacityReservationArn": arn,
        "OwnerId": self.current_account,
        "TotalInstanceCount": count,
        "CreateDate": now(),
        "State": "active",
        **fields,
    }
    reservations(self.ec2_backend)[id_] = reservation
    self.ec2_backend.create_tags([id_], self._parse_tag_specification().get("capacity-reservation", {}))
    return reservation


def describe_capacity_reservations(self: EC2Response) -> ActionResult:
    ids = self._get_param("CapacityReservationIds", [])
    selected = [_known(self.ec2_backend, id_) for id_ in ids] or list(reservations(self.ec2_backend).values())
    descriptions = [_describe(self.ec2_backend, reservation) for reservation in selected]
    return ActionResult({"CapacityReservations": _matching(descriptions, self._filters_from_querystring())})


def modify_capacity_reservation(self: EC2Response) -> ActionResult:
    reservation = _known(self.ec2_backend, self._get_param("CapacityReservationId"))
    if (state := state_of(reservation)) != "active":
        raise EC2ClientError("InvalidCapacityReservationState", f"A reservation in state {state} cannot be modified.")
    count = self._get_int_param("InstanceCount", reservation["TotalInstanceCount"])
    if count < taken(self.ec2_backend, reservation["CapacityReservationId"]):
        raise EC2ClientError("InvalidInstanceCount", "The reservation holds more running instances than that.")
    reservation["TotalInstanceCount"] = count
    for name in ("EndDate", "EndDateType", "InstanceMatchCriteria"):
        if (value := self._get_param(name)) is not None:
            reservation[name] = value
    if reservation["EndDateType"] == "unlimited":
        reservation.pop("EndDate", None)
    return ActionResult({"Return": True})


def cancel_capacity_reservation(self: EC2Response) -> ActionResult:
    reservation = _known(self.ec2_backend, self._get_param("CapacityReservationId"))
    if reservation["ReservationType"] == "capacity-block":
        raise EC2ClientError("UnsupportedOperation", "A Capacity Block cannot be cancelled.")
    reservation["State"] = "cancelled"
    return ActionResult({"Return": True})


def describe_capacity_block_offerings(self: EC2Response) -> ActionResult:
    kind, hours = self._get_param("InstanceType"), self._get_int_param("CapacityDurationHours")
    if kind not in _IN_BLOCKS:
        return ActionResult({"CapacityBlockOfferings": []})
    earliest = _time(self._get_param("StartDateRange") or now())
    start = datetime.combine(earliest.date(), _BEGINS)
    start += timedelta(days=0 if start >= earliest else 1)
    offer = {
        "CapacityBlockOfferingId": _id("cb"),
        "InstanceType": kind,
        "AvailabilityZone": f"{self.region}a",
        "InstanceCount": self._get_int_param("InstanceCount", 1),
        "StartDate": start,
        "EndDate": start + timedelta(hours=hours),
        "CapacityBlockDurationHours": hours,
        "UpfrontFee": "0",
        "CurrencyCode": "USD",
        "Tenancy": "default",
    }
    latest = self._get_param("EndDateRange")
    if latest and offer["EndDate"] > _time(latest):
        return ActionResult({"CapacityBlockOfferings": []})
    _offers(self.ec2_backend)[offer["CapacityBlockOfferingId"]] = offer
    return ActionResult({"CapacityBlockOfferings": [offer]})


def purchase_capacity_block(self: EC2Response) -> ActionResult:
    offer = _offers(self.ec2_backend).pop(self._get_param("CapacityBlockOfferingId"), None)
    if offer is None:
        raise EC2ClientError("InvalidCapacityBlockOfferingId.NotFound", "There is no such offer.")
    same = {name: offer[name] for name in ("AvailabilityZone", "InstanceType", "StartDate", "EndDate", "Tenancy")}
    reservation = _reserve(
        self,
        offer["InstanceCount"],
        **same,
        InstancePlatform=self._get_param("InstancePlatform"),
        EndDateType="limited",
        InstanceMatchCriteria="targeted",
        ReservationType="capacity-block",
    )
    return ActionResult({"CapacityReservation": _describe(self.ec2_backend, reservation)})


_CALLS: Final[tuple[Callable[[EC2Response], ActionResult], ...]] = (
    cancel_capacity_reservation,
    create_capacity_reservation,
    create_placement_group,
    delete_placement_group,
    describe_capacity_block_offerings,
    describe_capacity_reservations,
    describe_placement_groups,
    modify_capacity_reservation,
    purchase_capacity_block,
)


def apply() -> None:
    EC2_RESOURCE_TO_PREFIX.update({"capacity-reservation": "cr", "placement-group": "pg"})  # these types have tags
    for call in _CALLS:
        setattr(EC2Response, call.__name__, call)
