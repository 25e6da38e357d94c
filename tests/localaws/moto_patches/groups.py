"""Auto Scaling groups keep all settings, and a deleted group leaves nothing behind. Moto forgets most settings and
keeps the hooks, policies and schedules of a deleted group."""

from collections.abc import Mapping
from typing import Any, Final

from moto.autoscaling.exceptions import AutoscalingClientError, ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import camelcase_to_underscores

from tests.localaws.moto_patches._around import around
from tests.localaws.moto_patches.hooks import keep_hook
from tests.localaws.moto_patches.scaling import group_of

_FORGOTTEN: Final = (
    "CapacityRebalance",
    "CapacityReservationSpecification",
    "DefaultCooldown",
    "DefaultInstanceWarmup",
    "DesiredCapacityType",
    "InstanceMaintenancePolicy",
    "MaxInstanceLifetime",
    "PlacementGroup",
    "ServiceLinkedRoleARN",
    "TerminationPolicies",
)
_METRICS: Final = (
    "GroupDesiredCapacity",
    "GroupInServiceInstances",
    "GroupMaxSize",
    "GroupMinSize",
    "GroupPendingInstances",
    "GroupStandbyInstances",
    "GroupTerminatingInstances",
    "GroupTotalInstances",
)


def _create_group(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """Create a group; its hooks exist before the first instance."""
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    if name in backend.autoscaling_groups:
        raise AutoscalingClientError("AlreadyExists", f"AutoScalingGroup by this name already exists - {name}")
    for hook in self._get_param("LifecycleHookSpecificationList", []):
        keep_hook(backend, name, hook)
    try:
        result: ActionResult = stock(self)
    except ServiceException:
        _forget(backend, name)
        raise
    _remember(backend.autoscaling_groups[name], self._get_params())
    return result


def _update_group(stock: Any, self: AutoScalingResponse) -> ActionResult:
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    parameters = self._get_params()
    policy = group.mixed_instances_policy
    result: ActionResult = stock(self)
    if "MixedInstancesPolicy" not in parameters and "LaunchTemplate" not in parameters:
        group.mixed_instances_policy = policy
    if "LaunchTemplate" in parameters:
        group.mixed_instances_policy = None
    _remember(group, parameters)
    return result


def _remember(group: FakeAutoScalingGroup, parameters: Mapping[str, Any]) -> None:
    """Store the settings; a special value (-1, 0, empty) clears a setting."""
    for name in _FORGOTTEN:
        if name in parameters:
            setattr(
                group, camelcase_to_underscores(name), None if _is_nothing(name, parameters[name]) else parameters[name]
            )


def _is_nothing(name: str, value: Any) -> bool:
    if name == "InstanceMaintenancePolicy":
        return bool(value.get("MinHealthyPercentage") == -1)
    return value == "" or (name, value) in (("DefaultInstanceWarmup", -1), ("MaxInstanceLifetime", 0))


def _delete_group(stock: Any, self: AutoScalingResponse) -> ActionResult:
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    if group_of(backend, name).instance_states and not self._get_bool_param("ForceDelete", False):
        raise AutoscalingClientError(
            "ResourceInUse", "You cannot delete an AutoScalingGroup while there are instances or pending Spot requests."
        )
    result: ActionResult = stock(self)
    _forget(backend, name)
    return result


def _forget(backend: AutoScalingBackend, name: str) -> None:
    for records in (backend.lifecycle_hooks, backend.policies, backend.scheduled_actions):
        for key in [key for key, record in records.items() if record.auto_scaling_group_name == name]:
            del records[key]


def _put_policy(stock: Any, self: AutoScalingResponse) -> ActionResult:
    group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    arn = stock(self)._result["PolicyArn"]
    return ActionResult({"PolicyARN": arn, "Alarms": []})


def _enable_metrics(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """Enable the named metrics, or all if none is named."""
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    group.metrics = sorted({*group.metrics, *(self._get_param("Metrics") or _METRICS)})
    return EmptyResult()


def disable_metrics_collection(self: AutoScalingResponse) -> ActionResult:
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    named = self._get_param("Metrics") or group.metrics
    group.metrics = [metric for metric in group.metrics if metric not in named]
    return EmptyResult()


def _enter_standby(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """An instance on standby is no target. The capacity does not fall below the minimum."""
    backend, ids = self.autoscaling_backend, self._get_param("InstanceIds", [])
    group = group_of(backend, self._get_param("AutoScalingGroupName"))
    states = {state.instance.id: state.lifecycle_state for state in group.instance_states}
    for id_ in ids:
        if states.get(id_) != "InService":
            raise ValidationError(f"The instance {id_} is not in InService.")
    least = group.min_size or 0
    if self._get_bool_param("ShouldDecrementDesiredCapacity") and (group.desired_capacity or 0) - len(ids) < least:
        raise ValidationError(
            f"AutoScalingGroup {group.name} has min-size={least}, desired capacity {group.desired_capacity}: "
            f"{len(ids)} instances cannot go on standby."
        )
    result: ActionResult = stock(self)
    for arn in group.target_group_arns:
        backend.elbv2_backend.deregister_targets(arn, [{"Id": id_} for id_ in ids])
    return result


def apply() -> None:
    for name, new in {
        "create_auto_scaling_group": _create_group,
        "delete_auto_scaling_group": _delete_group,
        "enable_metrics_collection": _enable_metrics,
        "enter_standby": _enter_standby,
        "put_scaling_policy": _put_policy,
        "update_auto_scaling_group": _update_group,
    }.items():
        around(AutoScalingResponse, name, new)
    AutoScalingResponse.disable_metrics_collection = disable_metrics_collection
