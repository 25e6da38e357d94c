"""Auto Scaling groups.

A change of what a group launches by goes through an instance refresh if its update policy has one; a refresh that fails
puts the group back before the stack hears of it.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from tests.localaws.formation.faults import Refused
from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags

_REFRESH: Final = "AutoScalingInstanceRefresh"
_SCHEDULES: Final = "AutoScalingScheduledAction"
_LAUNCHED_BY: Final = ("LaunchTemplate", "MixedInstancesPolicy", "VPCZoneIdentifier")
_SIZES: Final = ("DesiredCapacity", "MaxSize", "MinSize")
_PATIENCE: Final = 5  # looks at a refresh that does not move
_BESIDE: Final = frozenset({"LifecycleHookSpecificationList", "MetricsCollection", "Tags", "TargetGroupARNs"})
# What the service has when a template says nothing.
_USUAL: Final[Mapping[str, Any]] = {
    "CapacityRebalance": False,
    "Cooldown": 300,
    "DefaultInstanceWarmup": -1,
    "HealthCheckGracePeriod": 0,
    "HealthCheckType": "EC2",
    "InstanceMaintenancePolicy": {"MaxHealthyPercentage": -1, "MinHealthyPercentage": -1},
    "MaxInstanceLifetime": 0,
    "NewInstancesProtectedFromScaleIn": False,
    "PlacementGroup": "",
    "TerminationPolicies": ["Default"],
}


@provides
class AutoScalingGroup(Provider):
    type = "AWS::AutoScaling::AutoScalingGroup"
    properties = frozenset(
        {
            *_BESIDE,
            *_LAUNCHED_BY,
            *_SIZES,
            *_USUAL,
            "AutoScalingGroupName",
            "AvailabilityZones",
            "CapacityReservationSpecification",
            "DesiredCapacityType",
            "ServiceLinkedRoleARN",
        }
    )
    fixed = frozenset({"AutoScalingGroupName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        _check(at.policies)
        service, name = at.client("autoscaling"), wanted.get("AutoScalingGroupName") or at.name(255)
        given = _as_called({**wanted, "AutoScalingGroupName": name}, but=frozenset({"MetricsCollection", "Tags"}))
        labels = _labels(name, wanted)
        call = shaped(service, "create_auto_scaling_group", {**given, **({"Tags": labels} if labels else {})})
        service.create_auto_scaling_group(**call)
        told = _group(service, name)
        made = Made(name, {"AutoScalingGroupARN": told["AutoScalingGroupARN"]})
        at.begin(made)
        _collect(service, name, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        _check(at.policies)
        service, policy = at.client("autoscaling"), at.policies.get("UpdatePolicy", {})
        kept = policy.get(_SCHEDULES, {}).get("IgnoreUnmodifiedGroupSizeProperties", False)
        self._change(service, made.id, before, wanted, str(kept).lower() == "true")
        refresh = policy.get(_REFRESH)
        if refresh is None or all(before.get(name) == wanted.get(name) for name in _LAUNCHED_BY):
            return made
        try:
            _refresh(service, made.id, refresh)
        except Refused:
            self._change(service, made.id, wanted, before, keep_sizes=True)
            calm = {name: each for name, each in refresh.get("Preferences", {}).items() if name != "AlarmSpecification"}
            _refresh(service, made.id, {**refresh, "Preferences": calm})
            raise
        return made

    def _change(self, service: Any, name: str, before: Properties, wanted: Properties, keep_sizes: bool) -> None:
        """Sizes that the template leaves alone may have been changed since, by schedules and policies."""
        left = {size for size in _SIZES if keep_sizes and before.get(size) == wanted.get(size)}
        back = {key: value for key, value in _USUAL.items() if key in before and key not in wanted}
        given = _as_called({**back, **wanted, "AutoScalingGroupName": name}, but=_BESIDE | left)
        service.update_auto_scaling_group(**shaped(service, "update_auto_scaling_group", given))
        _attach(service, name, before, wanted)
        _hook(service, name, before, wanted)
        _collect(service, name, before, wanted)
        if gone := [tag for tag in _labels(name, before) if tag["Key"] not in {each["Key"] for each in tags(wanted)}]:
            service.delete_tags(Tags=gone)
        if labels := _labels(name, wanted):
            service.create_or_update_tags(Tags=labels)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=made.id, ForceDelete=True)

    def read(self, made: Made, at: Site) -> Properties:
        service = at.client("autoscaling")
        found = _group(service, made.id)
        hooks = service.describe_lifecycle_hooks(AutoScalingGroupName=made.id)["LifecycleHooks"]
        metrics = [one["Metric"] for one in found.get("EnabledMetrics", [])]
        return {
            **found,
            "Cooldown": found["DefaultCooldown"],
            "LifecycleHookSpecificationList": hooks,
            "MetricsCollection": [{"Granularity": "1Minute", "Metrics": metrics}] if metrics else [],
            "VPCZoneIdentifier": found.get("VPCZoneIdentifier", "").split(","),
        }


def _check(policies: Mapping[str, Any]) -> None:
    unknown = [*sorted(set(policies) - {"UpdatePolicy"})]
    unknown += sorted(set(policies.get("UpdatePolicy", {})) - {_REFRESH, _SCHEDULES})
    if unknown:
        raise Refused(f"the local AWS does not carry out {', '.join(unknown)} of AWS::AutoScaling::AutoScalingGroup")


def _as_called(properties: Properties, but: frozenset[str] | set[str]) -> dict[str, Any]:
    """In the names of the service."""
    given = {name: value for name, value in properties.items() if name not in but}
    if "Cooldown" in given:
        given["DefaultCooldown"] = given.pop("Cooldown")
    if "VPCZoneIdentifier" in given:
        given["VPCZoneIdentifier"] = ",".join(given["VPCZoneIdentifier"])
    return given


def _labels(group: str, properties: Properties) -> list[dict[str, Any]]:
    launched = {tag["Key"]: str(tag["PropagateAtLaunch"]).lower() == "true" for tag in properties.get("Tags", [])}
    same = {"ResourceId": group, "ResourceType": "auto-scaling-group"}
    return [{**tag, **same, "PropagateAtLaunch": launched[tag["Key"]]} for tag in tags(properties)]


def _group(service: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = service.describe_auto_scaling_groups(AutoScalingGroupNames=[name])["AutoScalingGroups"][0]
    return found


def _attach(service: Any, name: str, before: Properties, wanted: Properties) -> None:
    old, new = (each.get("TargetGroupARNs", []) for each in (before, wanted))
    if come := [arn for arn in new if arn not in old]:
        service.attach_load_balancer_target_groups(AutoScalingGroupName=name, TargetGroupARNs=come)
    if gone := [arn for arn in old if arn not in new]:
        service.detach_load_balancer_target_groups(AutoScalingGroupName=name, TargetGroupARNs=gone)


def _hook(service: Any, name: str, before: Properties, wanted: Properties) -> None:
    old, new = (
        {one["LifecycleHookName"]: one for one in each.get("LifecycleHookSpecificationList", [])}
        for each in (before, wanted)
    )
    for hook in old.keys() - new.keys():
        service.delete_lifecycle_hook(AutoScalingGroupName=name, LifecycleHookName=hook)
    for one in new.values():
        service.put_lifecycle_hook(**shaped(service, "put_lifecycle_hook", {**one, "AutoScalingGroupName": name}))


def _collect(service: Any, name: str, before: Properties, wanted: Properties) -> None:
    if before.get("MetricsCollection") == wanted.get("MetricsCollection"):
        return
    if "MetricsCollection" in before:
        service.disable_metrics_collection(AutoScalingGroupName=name)
    for one in wanted.get("MetricsCollection", []):
        given = {"AutoScalingGroupName": name, **one}
        service.enable_metrics_collection(**shaped(service, "enable_metrics_collection", given))


def _refresh(service: Any, group: str, policy: Mapping[str, Any]) -> None:
    """Waits for its end. One that does not move any more is given up."""
    preferences = {"SkipMatching": True, **policy.get("Preferences", {})}
    wanted = {"AutoScalingGroupName": group, "Preferences": preferences}
    if "Strategy" in policy:
        wanted["Strategy"] = policy["Strategy"]
    given = shaped(service, "start_instance_refresh", wanted)
    mine = {
        "AutoScalingGroupName": group,
        "InstanceRefreshIds": [service.start_instance_refresh(**given)["InstanceRefreshId"]],
    }
    seen: list[tuple[Any, ...]] = []
    while len(seen) < _PATIENCE or len(set(seen[-_PATIENCE:])) > 1:
        told = service.describe_instance_refreshes(**mine)["InstanceRefreshes"][0]
        if told["Status"] == "Successful":
            return
        if told["Status"] in ("Failed", "Cancelled", "RollbackSuccessful", "RollbackFailed"):
            raise Refused(f"Instance refresh {told['Status']}: {told.get('StatusReason', 'no reason was given')}")
        seen.append((told["Status"], told.get("InstancesToUpdate")))
        time.sleep(0)  # a server has other requests to answer
    service.cancel_instance_refresh(AutoScalingGroupName=group)
    waiting = [one["InstanceId"] for one in _group(service, group)["Instances"] if one["LifecycleState"] != "InService"]
    raise Refused(f"Instance refresh stopped: {', '.join(waiting)} still wait for their lifecycle hooks")
