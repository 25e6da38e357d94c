"""Auto Scaling groups keep what they are told, and leave nothing behind. Moto forgets most settings of a group, and
keeps what hung on a deleted one."""

from collections.abc import Mapping
from typing import Any, Final

from moto.autoscaling.exceptions import AutoscalingClientError
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
    """With the hooks of the request there before the first instance is."""
    backend, name = self.autoscaling_backend, self._get_param("AutoScalingGroupName")
    if name in backend.autoscaling_groups:
        raise AutoscalingClientError("AlreadyExists", f"AutoScalingGroup by this name already exists - {name}")
    for one in self._get_param("LifecycleHookSpecificationList", []):
        keep_hook(backend, name, one)
    try:
        told: ActionResult = stock(self)
    except ServiceException:
        _forget(backend, name)
        raise
    _remember(backend.autoscaling_groups[name], self._get_params())
    return told


def _update_group(stock: Any, self: AutoScalingResponse) -> ActionResult:
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    given = self._get_params()
    kept = group.mixed_instances_policy
    told: ActionResult = stock(self)
    if "MixedInstancesPolicy" not in given and "LaunchTemplate" not in given:
        group.mixed_instances_policy = kept
    if "LaunchTemplate" in given:
        group.mixed_instances_policy = None
    _remember(group, given)
    return told


def _remember(group: FakeAutoScalingGroup, given: Mapping[str, Any]) -> None:
    """A setting is taken back by a value of no meaning."""
    for name in _FORGOTTEN:
        if name in given:
            setattr(group, camelcase_to_underscores(name), None if _is_nothing(name, given[name]) else given[name])


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
    told: ActionResult = stock(self)
    _forget(backend, name)
    return told


def _forget(backend: AutoScalingBackend, name: str) -> None:
    for kept in (backend.lifecycle_hooks, backend.policies, backend.scheduled_actions):
        for key in [key for key, one in kept.items() if one.auto_scaling_group_name == name]:
            del kept[key]


def _put_policy(stock: Any, self: AutoScalingResponse) -> ActionResult:
    group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    arn = stock(self)._result["PolicyArn"]
    return ActionResult({"PolicyARN": arn, "Alarms": []})


def _enable_metrics(stock: Any, self: AutoScalingResponse) -> ActionResult:
    """All of them, if none is named."""
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    group.metrics = sorted({*group.metrics, *(self._get_param("Metrics") or _METRICS)})
    return EmptyResult()


def disable_metrics_collection(self: AutoScalingResponse) -> ActionResult:
    group = group_of(self.autoscaling_backend, self._get_param("AutoScalingGroupName"))
    named = self._get_param("Metrics") or group.metrics
    group.metrics = [each for each in group.metrics if each not in named]
    return EmptyResult()


def mend() -> None:
    for name, new in {
        "create_auto_scaling_group": _create_group,
        "delete_auto_scaling_group": _delete_group,
        "enable_metrics_collection": _enable_metrics,
        "put_scaling_policy": _put_policy,
        "update_auto_scaling_group": _update_group,
    }.items():
        around(AutoScalingResponse, name, new)
    AutoScalingResponse.disable_metrics_collection = disable_metrics_collection
