"""Auto Scaling groups.

A change of the launch configuration goes through an instance refresh if the update policy has one. If the refresh
fails, the group is restored before the stack fails.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from tests.localaws.formation.faults import Refused
from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags

_REFRESH: Final = "AutoScalingInstanceRefresh"
_SCHEDULES: Final = "AutoScalingScheduledAction"
_LAUNCHED_BY: Final = ("LaunchTemplate", "MixedInstancesPolicy", "VPCZoneIdentifier")
_SIZES: Final = ("DesiredCapacity", "MaxSize", "MinSize")
_PATIENCE: Final = 5  # descriptions of a refresh without progress
_BESIDE: Final = frozenset({"LifecycleHookSpecificationList", "MetricsCollection", "Tags", "TargetGroupARNs"})
# The service's defaults.
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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        _check(site.policies)
        service, name = site.client("autoscaling"), desired.get("AutoScalingGroupName") or site.name(255)
        arguments = _as_called(
            {**desired, "AutoScalingGroupName": name}, exclude=frozenset({"MetricsCollection", "Tags"})
        )
        labels = _labels(name, desired)
        call = shaped(service, "create_auto_scaling_group", {**arguments, **({"Tags": labels} if labels else {})})
        service.create_auto_scaling_group(**call)
        group = _group(service, name)
        resource = PhysicalResource(name, {"AutoScalingGroupARN": group["AutoScalingGroupARN"]})
        site.begin(resource)
        _collect(service, name, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        _check(site.policies)
        service, policy = site.client("autoscaling"), site.policies.get("UpdatePolicy", {})
        ignore_sizes = policy.get(_SCHEDULES, {}).get("IgnoreUnmodifiedGroupSizeProperties", False)
        self._change(service, resource.id, before, desired, str(ignore_sizes).lower() == "true")
        refresh = policy.get(_REFRESH)
        if refresh is None or all(before.get(name) == desired.get(name) for name in _LAUNCHED_BY):
            return resource
        try:
            _refresh(service, resource.id, refresh)
        except Refused:
            self._change(service, resource.id, desired, before, keep_sizes=True)
            calm = {
                name: preference
                for name, preference in refresh.get("Preferences", {}).items()
                if name != "AlarmSpecification"
            }
            _refresh(service, resource.id, {**refresh, "Preferences": calm})
            raise
        return resource

    def _change(self, service: Any, name: str, before: Properties, desired: Properties, keep_sizes: bool) -> None:
        """Update the group. Sizes that the template does not change are kept: schedules and policies may have changed
        them."""
        unchanged = {size for size in _SIZES if keep_sizes and before.get(size) == desired.get(size)}
        back = {key: value for key, value in _USUAL.items() if key in before and key not in desired}
        arguments = _as_called({**back, **desired, "AutoScalingGroupName": name}, exclude=_BESIDE | unchanged)
        service.update_auto_scaling_group(**shaped(service, "update_auto_scaling_group", arguments))
        _attach(service, name, before, desired)
        _hook(service, name, before, desired)
        _collect(service, name, before, desired)
        if removed := [
            tag for tag in _labels(name, before) if tag["Key"] not in {entry["Key"] for entry in tags(desired)}
        ]:
            service.delete_tags(Tags=removed)
        if labels := _labels(name, desired):
            service.create_or_update_tags(Tags=labels)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=resource.id, ForceDelete=True)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        service = site.client("autoscaling")
        actual = _group(service, resource.id)
        hooks = service.describe_lifecycle_hooks(AutoScalingGroupName=resource.id)["LifecycleHooks"]
        metrics = [enabled_metric["Metric"] for enabled_metric in actual.get("EnabledMetrics", [])]
        return {
            **actual,
            "Cooldown": actual["DefaultCooldown"],
            "LifecycleHookSpecificationList": hooks,
            "MetricsCollection": [{"Granularity": "1Minute", "Metrics": metrics}] if metrics else [],
            "VPCZoneIdentifier": actual.get("VPCZoneIdentifier", "").split(","),
        }


def _check(policies: Mapping[str, Any]) -> None:
    unknown = [*sorted(set(policies) - {"UpdatePolicy"})]
    unknown += sorted(set(policies.get("UpdatePolicy", {})) - {_REFRESH, _SCHEDULES})
    if unknown:
        raise Refused(f"the local AWS does not support {', '.join(unknown)} of AWS::AutoScaling::AutoScalingGroup")


def _as_called(properties: Properties, exclude: frozenset[str] | set[str]) -> dict[str, Any]:
    """The properties with the names of the service."""
    arguments = {name: value for name, value in properties.items() if name not in exclude}
    if "Cooldown" in arguments:
        arguments["DefaultCooldown"] = arguments.pop("Cooldown")
    if "VPCZoneIdentifier" in arguments:
        arguments["VPCZoneIdentifier"] = ",".join(arguments["VPCZoneIdentifier"])
    return arguments


def _labels(group: str, properties: Properties) -> list[dict[str, Any]]:
    launched = {tag["Key"]: str(tag["PropagateAtLaunch"]).lower() == "true" for tag in properties.get("Tags", [])}
    same = {"ResourceId": group, "ResourceType": "auto-scaling-group"}
    return [{**tag, **same, "PropagateAtLaunch": launched[tag["Key"]]} for tag in tags(properties)]


def _group(service: Any, name: str) -> dict[str, Any]:
    auto_scaling_group: dict[str, Any] = service.describe_auto_scaling_groups(AutoScalingGroupNames=[name])[
        "AutoScalingGroups"
    ][0]
    return auto_scaling_group


def _attach(service: Any, name: str, before: Properties, desired: Properties) -> None:
    old, new = (entry.get("TargetGroupARNs", []) for entry in (before, desired))
    if added := [arn for arn in new if arn not in old]:
        service.attach_load_balancer_target_groups(AutoScalingGroupName=name, TargetGroupARNs=added)
    if removed := [arn for arn in old if arn not in new]:
        service.detach_load_balancer_target_groups(AutoScalingGroupName=name, TargetGroupARNs=removed)


def _hook(service: Any, name: str, before: Properties, desired: Properties) -> None:
    old, new = (
        {item["LifecycleHookName"]: item for item in entry.get("LifecycleHookSpecificationList", [])}
        for entry in (before, desired)
    )
    for hook in old.keys() - new.keys():
        service.delete_lifecycle_hook(AutoScalingGroupName=name, LifecycleHookName=hook)
    for entry in new.values():
        service.put_lifecycle_hook(**shaped(service, "put_lifecycle_hook", {**entry, "AutoScalingGroupName": name}))


def _collect(service: Any, name: str, before: Properties, desired: Properties) -> None:
    if before.get("MetricsCollection") == desired.get("MetricsCollection"):
        return
    if "MetricsCollection" in before:
        service.disable_metrics_collection(AutoScalingGroupName=name)
    for entry in desired.get("MetricsCollection", []):
        arguments = {"AutoScalingGroupName": name, **entry}
        service.enable_metrics_collection(**shaped(service, "enable_metrics_collection", arguments))


def _refresh(service: Any, group: str, policy: Mapping[str, Any]) -> None:
    """Run an instance refresh and wait for its end; cancel it if it makes no progress."""
    preferences = {"SkipMatching": True, **policy.get("Preferences", {})}
    request = {"AutoScalingGroupName": group, "Preferences": preferences}
    if "Strategy" in policy:
        request["Strategy"] = policy["Strategy"]
    arguments = shaped(service, "start_instance_refresh", request)
    selector = {
        "AutoScalingGroupName": group,
        "InstanceRefreshIds": [service.start_instance_refresh(**arguments)["InstanceRefreshId"]],
    }
    progress: list[tuple[Any, ...]] = []
    while len(progress) < _PATIENCE or len(set(progress[-_PATIENCE:])) > 1:
        instance_refresh = service.describe_instance_refreshes(**selector)["InstanceRefreshes"][0]
        if instance_refresh["Status"] == "Successful":
            return
        if instance_refresh["Status"] in ("Failed", "Cancelled", "RollbackSuccessful", "RollbackFailed"):
            raise Refused(
                f"Instance refresh {instance_refresh['Status']}: {instance_refresh.get('StatusReason', 'no reason')}"
            )
        progress.append((instance_refresh["Status"], instance_refresh.get("InstancesToUpdate")))
        time.sleep(0)  # yield to other requests of the server
    service.cancel_instance_refresh(AutoScalingGroupName=group)
    waiting = [
        instance["InstanceId"]
        for instance in _group(service, group)["Instances"]
        if instance["LifecycleState"] != "InService"
    ]
    raise Refused(f"Instance refresh stopped: {', '.join(waiting)} still wait for their lifecycle hooks")
