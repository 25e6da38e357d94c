"""Lifecycle hooks, warm pools, scaling policies and scheduled actions of Auto Scaling groups."""

from typing import Any, ClassVar

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped


class _OfGroup(Provider):
    """A resource with a name of its own and that of its group."""

    named: ClassVar[str]
    longest: ClassVar[int] = 255

    def name(self, desired: Properties, site: Site) -> str:
        return desired.get(self.named) or site.name(self.longest)


@provides
class LifecycleHook(_OfGroup):
    type = "AWS::AutoScaling::LifecycleHook"
    named = "LifecycleHookName"
    properties = frozenset(
        {
            "AutoScalingGroupName",
            "DefaultResult",
            "HeartbeatTimeout",
            "LifecycleHookName",
            "LifecycleTransition",
            "NotificationMetadata",
            "NotificationTargetARN",
            "RoleARN",
        }
    )
    fixed = frozenset({"AutoScalingGroupName", "LifecycleHookName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        return self._put(self.name(desired, site), desired, site)

    def _put(self, name: str, desired: Properties, site: Site) -> PhysicalResource:
        service = site.client("autoscaling")
        service.put_lifecycle_hook(**shaped(service, "put_lifecycle_hook", {**desired, self.named: name}))
        return PhysicalResource(name, state={"AutoScalingGroupName": desired["AutoScalingGroupName"]})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        """Replace the hook if the template removes settings: PutLifecycleHook keeps those that it does not get."""
        if before.keys() - desired.keys():
            self.delete(resource, before, site)
        return self._put(resource.id, desired, site)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("autoscaling").delete_lifecycle_hook(**resource.state, LifecycleHookName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("autoscaling").describe_lifecycle_hooks(
            **resource.state, LifecycleHookNames=[resource.id]
        )
        actual: dict[str, Any] = response["LifecycleHooks"][0]
        return actual


@provides
class WarmPool(Provider):
    type = "AWS::AutoScaling::WarmPool"
    properties = frozenset(
        {"AutoScalingGroupName", "InstanceReusePolicy", "MaxGroupPreparedCapacity", "MinSize", "PoolState"}
    )
    fixed = frozenset({"AutoScalingGroupName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        service = site.client("autoscaling")
        service.put_warm_pool(**shaped(service, "put_warm_pool", desired))
        return PhysicalResource(desired["AutoScalingGroupName"])

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        return self.create(desired, site)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("autoscaling").delete_warm_pool(AutoScalingGroupName=resource.id, ForceDelete=True)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("autoscaling").describe_warm_pool(AutoScalingGroupName=resource.id)
        return {"AutoScalingGroupName": resource.id, **response["WarmPoolConfiguration"]}


@provides
class ScalingPolicy(Provider):
    type = "AWS::AutoScaling::ScalingPolicy"
    properties = frozenset(
        {
            "AdjustmentType",
            "AutoScalingGroupName",
            "Cooldown",
            "EstimatedInstanceWarmup",
            "MetricAggregationType",
            "MinAdjustmentMagnitude",
            "PolicyType",
            "ScalingAdjustment",
            "StepAdjustments",
            "TargetTrackingConfiguration",
        }
    )
    fixed = frozenset({"AutoScalingGroupName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        return self._put(site.name(255), desired, site)

    def _put(self, name: str, desired: Properties, site: Site) -> PhysicalResource:
        service = site.client("autoscaling")
        response = service.put_scaling_policy(**shaped(service, "put_scaling_policy", {**desired, "PolicyName": name}))
        group = {"AutoScalingGroupName": desired["AutoScalingGroupName"]}
        return PhysicalResource(response["PolicyARN"], {"Arn": response["PolicyARN"], "PolicyName": name}, state=group)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        return self._put(resource.attributes["PolicyName"], desired, site)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("autoscaling").delete_policy(**resource.state, PolicyName=resource.attributes["PolicyName"])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        service, name = site.client("autoscaling"), resource.attributes["PolicyName"]
        actual: dict[str, Any] = service.describe_policies(**resource.state, PolicyNames=[name])["ScalingPolicies"][0]
        return actual


@provides
class ScheduledAction(Provider):
    type = "AWS::AutoScaling::ScheduledAction"
    properties = frozenset(
        {
            "AutoScalingGroupName",
            "EndTime",
            "Recurrence",
            "StartTime",
            "TimeZone",
            "DesiredCapacity",
            "MaxSize",
            "MinSize",
        }
    )
    fixed = frozenset({"AutoScalingGroupName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        return self._put(site.name(255), desired, site)

    def _put(self, name: str, desired: Properties, site: Site) -> PhysicalResource:
        service, operation = site.client("autoscaling"), "put_scheduled_update_group_action"
        service.put_scheduled_update_group_action(
            **shaped(service, operation, {**desired, "ScheduledActionName": name})
        )
        group = {"AutoScalingGroupName": desired["AutoScalingGroupName"]}
        return PhysicalResource(name, {"ScheduledActionName": name}, state=group)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        return self._put(resource.id, desired, site)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("autoscaling").delete_scheduled_action(**resource.state, ScheduledActionName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("autoscaling").describe_scheduled_actions(
            **resource.state, ScheduledActionNames=[resource.id]
        )
        actual: dict[str, Any] = dict(response["ScheduledUpdateGroupActions"][0])
        times = {name: actual[name].isoformat() for name in ("StartTime", "EndTime") if actual.get(name)}
        return {**actual, **{name: value.replace("+00:00", "Z") for name, value in times.items()}}
