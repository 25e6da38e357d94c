"""What hangs on Auto Scaling groups: hooks, warm pools, policies and schedules."""

from typing import Any, ClassVar

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped


class _OfGroup(Provider):
    """By its own name, and by that of its group."""

    named: ClassVar[str]
    longest: ClassVar[int] = 255

    def name(self, wanted: Properties, at: Site) -> str:
        return wanted.get(self.named) or at.name(self.longest)


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

    def create(self, wanted: Properties, at: Site) -> Made:
        return self._put(self.name(wanted, at), wanted, at)

    def _put(self, name: str, wanted: Properties, at: Site) -> Made:
        service = at.client("autoscaling")
        service.put_lifecycle_hook(**shaped(service, "put_lifecycle_hook", {**wanted, self.named: name}))
        return Made(name, kept={"AutoScalingGroupName": wanted["AutoScalingGroupName"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        """What a hook is not told anew it keeps, so that less of it takes another one."""
        if before.keys() - wanted.keys():
            self.delete(made, before, at)
        return self._put(made.id, wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("autoscaling").delete_lifecycle_hook(**made.kept, LifecycleHookName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("autoscaling").describe_lifecycle_hooks(**made.kept, LifecycleHookNames=[made.id])
        found: dict[str, Any] = told["LifecycleHooks"][0]
        return found


@provides
class WarmPool(Provider):
    type = "AWS::AutoScaling::WarmPool"
    properties = frozenset(
        {"AutoScalingGroupName", "InstanceReusePolicy", "MaxGroupPreparedCapacity", "MinSize", "PoolState"}
    )
    fixed = frozenset({"AutoScalingGroupName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        service = at.client("autoscaling")
        service.put_warm_pool(**shaped(service, "put_warm_pool", wanted))
        return Made(wanted["AutoScalingGroupName"])

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        return self.create(wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("autoscaling").delete_warm_pool(AutoScalingGroupName=made.id, ForceDelete=True)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("autoscaling").describe_warm_pool(AutoScalingGroupName=made.id)
        return {"AutoScalingGroupName": made.id, **told["WarmPoolConfiguration"]}


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

    def create(self, wanted: Properties, at: Site) -> Made:
        return self._put(at.name(255), wanted, at)

    def _put(self, name: str, wanted: Properties, at: Site) -> Made:
        service = at.client("autoscaling")
        told = service.put_scaling_policy(**shaped(service, "put_scaling_policy", {**wanted, "PolicyName": name}))
        group = {"AutoScalingGroupName": wanted["AutoScalingGroupName"]}
        return Made(told["PolicyARN"], {"Arn": told["PolicyARN"], "PolicyName": name}, kept=group)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        return self._put(made.attributes["PolicyName"], wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("autoscaling").delete_policy(**made.kept, PolicyName=made.attributes["PolicyName"])

    def read(self, made: Made, at: Site) -> Properties:
        service, name = at.client("autoscaling"), made.attributes["PolicyName"]
        found: dict[str, Any] = service.describe_policies(**made.kept, PolicyNames=[name])["ScalingPolicies"][0]
        return found


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

    def create(self, wanted: Properties, at: Site) -> Made:
        return self._put(at.name(255), wanted, at)

    def _put(self, name: str, wanted: Properties, at: Site) -> Made:
        service, operation = at.client("autoscaling"), "put_scheduled_update_group_action"
        service.put_scheduled_update_group_action(**shaped(service, operation, {**wanted, "ScheduledActionName": name}))
        group = {"AutoScalingGroupName": wanted["AutoScalingGroupName"]}
        return Made(name, {"ScheduledActionName": name}, kept=group)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        return self._put(made.id, wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("autoscaling").delete_scheduled_action(**made.kept, ScheduledActionName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("autoscaling").describe_scheduled_actions(**made.kept, ScheduledActionNames=[made.id])
        found: dict[str, Any] = dict(told["ScheduledUpdateGroupActions"][0])
        times = {name: found[name].isoformat() for name in ("StartTime", "EndTime") if found.get(name)}
        return {**found, **{name: value.replace("+00:00", "Z") for name, value in times.items()}}
