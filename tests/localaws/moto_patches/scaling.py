"""Auto Scaling launches and terminations: by the group's template version, in all of its zones, with lifecycle hooks.

Moto launches by the first version of a template, in the first subnet only, and keeps terminated instances as targets.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, InstanceState
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.elbv2.exceptions import TargetGroupNotFoundError
from moto.events.models import events_backends

from tests.localaws.moto_patches import capacity
from tests.localaws.moto_patches._around import around

LAUNCHING: Final = "autoscaling:EC2_INSTANCE_LAUNCHING"
WAITING: Final = "Pending:Wait"


def group_of(backend: AutoScalingBackend, name: str) -> FakeAutoScalingGroup:
    if name not in backend.autoscaling_groups:
        raise ValidationError(f"AutoScalingGroup name not found - AutoScalingGroup '{name}' not found")
    return backend.autoscaling_groups[name]


def waiting_for(state: InstanceState) -> set[str]:
    hooks: set[str] = vars(state).setdefault("hooks_to_answer", set())
    return hooks


def _active(self: FakeAutoScalingGroup) -> list[InstanceState]:
    """The active instances; one that waits for its hook counts, so that no other is launched in its place."""
    return [state for state in self.instance_states if state.lifecycle_state in ("InService", WAITING)]


def _launch(stock: Any, self: FakeAutoScalingGroup, count_needed: int, propagated_tags: dict[str, str]) -> None:
    """Launch instances. A launch that EC2 refuses is a failed activity; the group stays below its desired capacity."""
    if self.ec2_launch_template is None:  # a launch configuration
        stock(self, count_needed, propagated_tags)
        return
    tags = {"aws:autoscaling:groupName": self.name, **propagated_tags}
    hooks = self.autoscaling_backend.describe_lifecycle_hooks(self.name)
    for subnet, kind, market in list(_places(self, count_needed)):
        try:
            instance = _run(self, subnet, kind, market, tags)
        except ServiceException as error:
            record(self, "Launching a new EC2 instance.", "Failed", str(error.message))
            announce_failed_launch(self, "", str(error.message))
            return
        instance.autoscaling_group = self
        state = InstanceState(instance, protected_from_scale_in=self.new_instances_protected_from_scale_in)
        state.launched_with = current_template(self)
        state.held_since = capacity.now()
        waiting_for(state).update(hook.name for hook in hooks if hook.lifecycle_transition == LAUNCHING)
        state.lifecycle_state = WAITING if waiting_for(state) else "InService"
        self.instance_states.append(state)
        record(self, f"Launching a new EC2 instance: {instance.id}", "Successful")


def _run(self: FakeAutoScalingGroup, subnet: str | None, kind: str, market: str | None, tags: Mapping[str, str]) -> Any:
    reservation = self.ec2_backend.run_instances(
        "",
        1,
        None,
        [],
        instance_type=kind,
        tags={"instance": dict(tags)},
        placement=self.availability_zones[0],
        launch_template={name: current_template(self)[name] for name in ("LaunchTemplateId", "Version")},
        is_instance_type_default=False,
        subnet_id=subnet,
        instance_market_options=market,
    )
    return reservation.instances[0]


def current_template(group: FakeAutoScalingGroup) -> dict[str, Any]:
    """The template with its version number: `$Latest` changes, but an instance keeps its version."""
    template = group.ec2_launch_template
    if template is None:  # a launch configuration, which has no versions
        return {}
    number = template.get_version(group.launch_template_version).number
    return {"LaunchTemplateId": template.id, "LaunchTemplateName": template.name, "Version": str(number)}


def _places(group: FakeAutoScalingGroup, count: int) -> Iterator[tuple[str | None, str, str | None]]:
    """Subnet, type and market of the next instances: the zone with the fewest, the first type of the overrides, and on
    demand as the distribution requires."""
    subnets = group.vpc_zone_identifier.split(",") if group.vpc_zone_identifier else [None]
    policy = group.mixed_instances_policy or {}
    distribution = policy.get("InstancesDistribution", {})
    base = int(distribution.get("OnDemandBaseCapacity") or 0)
    share = int(distribution.get("OnDemandPercentageAboveBaseCapacity", 100))
    used = [state.instance.subnet_id for state in group.instance_states]
    kind = next(
        (override["InstanceType"] for override in _overrides(group) if "InstanceType" in override), group.instance_type
    )
    paid = sum(state.instance.lifecycle != "spot" for state in group.instance_states)
    for number in range(len(used), len(used) + count):
        subnet = min(subnets, key=used.count)
        used.append(subnet)
        due = min(number + 1, base) + -(-max(0, number + 1 - base) * share // 100)
        spot = bool(policy) and paid >= due
        paid += not spot
        yield subnet, kind, "spot" if spot else None


def _overrides(group: FakeAutoScalingGroup) -> list[dict[str, Any]]:
    overrides: list[dict[str, Any]] = (
        (group.mixed_instances_policy or {}).get("LaunchTemplate", {}).get("Overrides", [])
    )
    return overrides


def end(group: FakeAutoScalingGroup, states: list[InstanceState]) -> None:
    if not states:
        return
    ids = [state.instance.id for state in states]
    group.instance_states = [state for state in group.instance_states if state not in states]
    group.ec2_backend.terminate_instances(ids)
    group.autoscaling_backend.elbv2_backend.notify_terminate_instances(ids)
    for id_ in ids:
        record(group, f"Terminating EC2 instance: {id_}", "Successful")


def _set_capacity(stock: Any, self: FakeAutoScalingGroup, new_capacity: int | None) -> None:
    """Set the desired capacity. Surplus instances of other templates are terminated first; a terminated instance is no
    longer a target."""
    if any("WeightedCapacity" in override for override in _overrides(self)):
        stock(self, new_capacity)
        return
    self.desired_capacity = self.min_size if new_capacity is None else new_capacity
    missing = (self.desired_capacity or 0) - len(self.active_instances())
    if missing > 0:
        self.replace_autoscaling_group_instances(missing, self.get_propagated_tags())
    elif missing < 0:
        free = [state for state in self.active_instances() if not state.protected_from_scale_in]
        free.sort(key=lambda state: state.launch_template == current_template(self))
        end(self, free[:-missing])
    if self.name in self.autoscaling_backend.autoscaling_groups:
        self.autoscaling_backend.update_attached_elbs(self.name)
        self.autoscaling_backend.update_attached_target_groups(self.name)


def _set_within_limits(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """SetDesiredCapacity refuses what is beyond the group's minimum and maximum."""
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    value, least, most = self._get_int_param("DesiredCapacity"), group.min_size or 0, group.max_size
    for wrong, limit in ((value < least, f"below min value {least}"), (value > most, f"above max value {most}")):
        if wrong:
            raise ValidationError(f"New SetDesiredCapacity value {value} is {limit} for the AutoScalingGroup.")
    result: ActionResult = stock(self)
    return result


def _register(stock: Any, self: AutoScalingBackend, group_name: str) -> None:
    """Register the instances in service as targets."""
    group = self.autoscaling_groups[group_name]
    ready = [state.instance.id for state in group.instance_states if state.lifecycle_state == "InService"]
    for arn in group.target_group_arns:
        if (target := self.elbv2_backend.target_groups.get(arn)) is None:
            raise TargetGroupNotFoundError()
        self.elbv2_backend.register_targets(arn, [{"Id": id_, "Port": target.port} for id_ in ready])


def record(group: FakeAutoScalingGroup, description: str, status: str, status_message: str | None = None) -> None:
    activities = vars(group.autoscaling_backend).setdefault("activities", [])
    activities.append(
        {
            "ActivityId": str(len(activities)),
            "AutoScalingGroupName": group.name,
            "Cause": f"At {utcnow()} the capacity of the group was to be {group.desired_capacity}.",
            "Description": description,
            "StartTime": utcnow(),
            "EndTime": utcnow(),
            "StatusCode": status,
            "StatusMessage": status_message,
            "Progress": 100,
        }
    )


def announce_failed_launch(group: FakeAutoScalingGroup, instance: str, reason: str) -> None:
    """The event of a launch that failed, or whose hook was abandoned or ran out."""
    detail = {
        "StatusCode": "Failed",
        "AutoScalingGroupName": group.name,
        "EC2InstanceId": instance,
        "StatusMessage": reason,
        "Cause": f"At {utcnow()} the capacity of the group was to be {group.desired_capacity}.",
        "Details": {"Availability Zone": group.availability_zones[0]},
    }
    event = {
        "Source": "aws.autoscaling",
        "DetailType": "EC2 Instance Launch Unsuccessful",
        "Detail": json.dumps(detail),
        "Resources": [group.arn],
    }
    backend = group.autoscaling_backend
    events_backends[backend.account_id][backend.region_name].put_events([event])


def _describe_activities(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """The activities, latest first."""
    name, activities = self._get_param("AutoScalingGroupName"), vars(self.autoscaling_backend).get("activities", [])
    return ActionResult(
        {
            "Activities": [
                activity for activity in reversed(activities) if name in (None, activity["AutoScalingGroupName"])
            ]
        }
    )


def apply() -> None:
    FakeAutoScalingGroup.active_instances = _active
    around(FakeAutoScalingGroup, "replace_autoscaling_group_instances", _launch)
    around(FakeAutoScalingGroup, "set_desired_capacity", _set_capacity)
    around(AutoScalingBackend, "update_attached_target_groups", _register)
    around(AutoScalingResponse, "set_desired_capacity", _set_within_limits)
    around(AutoScalingResponse, "describe_scaling_activities", _describe_activities)
    InstanceState.launch_template = property(lambda self: vars(self).get("launched_with"))
