"""Auto Scaling groups of a serving fleet: how they are bought, filled, held back until ready, and changed."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from aws_cdk import (
    CfnAutoScalingInstanceRefresh,
    CfnAutoScalingInstanceRefreshAlarmSpecification,
    CfnAutoScalingInstanceRefreshPreferences,
    CfnAutoScalingScheduledAction,
    CfnUpdatePolicy,
    aws_autoscaling,
    aws_ec2,
)
from constructs import Construct

from nxpipe.pipeline.config.fleets import (
    DRAINED_BEFORE_THE_END,
    CapacityBlock,
    ServingCapacity,
    ServingOnDemand,
    Size,
    WarmPool,
)
from nxpipe.stacks.handles import NetworkHandle

Group: TypeAlias = aws_autoscaling.CfnAutoScalingGroup


@dataclass(frozen=True)
class Colour:
    """One group of the fleet: what it is called, launched by, and how large it may be."""

    name: str
    template: aws_ec2.CfnLaunchTemplate
    types: tuple[str, ...]
    capacity: ServingCapacity
    size: Size
    serves_first: bool  # the others are empty until a rollout fills them
    targets: str  # the ARN of its target group
    ready_within: int  # seconds
    hook: str | None

    @property
    def alarm(self) -> str:
        """That stops a refresh."""
        return f"{self.name}-errors"


def group(scope: Construct, id_: str, colour: Colour, network: NetworkHandle) -> Group:
    """With its schedules if it is a capacity block's, and its warm pool if it has one."""
    filled = colour.serves_first and not isinstance(colour.capacity, CapacityBlock)
    desired = colour.size.desired if filled else 0
    made = Group(
        scope,
        id_,
        auto_scaling_group_name=colour.name,
        min_size="0",  # a rollout empties the colour that it has left; it keeps `size.min` itself
        desired_capacity=str(desired),
        max_size=str(colour.size.max),
        vpc_zone_identifier=[subnet.subnet_id for subnet in network.subnets.values()],
        target_group_arns=[colour.targets],
        health_check_type="ELB",
        # The hook lets an instance in when its artifact is there; then the server loads it.
        health_check_grace_period=colour.ready_within,
        capacity_rebalance=True if colour.capacity.kind == "spot" else None,
        lifecycle_hook_specification_list=_hooks(colour),
        metrics_collection=[Group.MetricsCollectionProperty(granularity="1Minute")],
        tags=[Group.TagPropertyProperty(key="Name", value=colour.name, propagate_at_launch=True)],
        **_launched_by(colour),
    )
    made.cfn_options.update_policy = _changed(colour)
    if isinstance(colour.capacity, CapacityBlock):
        _open_with_the_block(scope, id_, made, colour, colour.capacity)
    if isinstance(colour.capacity, ServingOnDemand) and colour.capacity.warm_pool:
        _keep_warm(scope, id_, made, colour.capacity.warm_pool)
    return made


def _hooks(colour: Colour) -> list[Any] | None:
    """In the group itself: a hook beside it would come after its first instances."""
    if colour.hook is None:
        return None
    return [
        Group.LifecycleHookSpecificationProperty(
            lifecycle_hook_name=colour.hook,
            lifecycle_transition="autoscaling:EC2_INSTANCE_LAUNCHING",
            heartbeat_timeout=colour.ready_within,
            default_result="ABANDON",
        )
    ]


def _launched_by(colour: Colour) -> dict[str, Any]:
    by = Group.LaunchTemplateSpecificationProperty(
        launch_template_id=colour.template.ref, version=colour.template.attr_latest_version_number
    )
    spot = colour.capacity.kind == "spot"
    if len(colour.types) == 1 and not spot:
        return {"launch_template": by}
    distribution = Group.InstancesDistributionProperty(
        on_demand_allocation_strategy="prioritized",
        on_demand_base_capacity=colour.capacity.on_demand_base if colour.capacity.kind == "spot" else 0,
        on_demand_percentage_above_base_capacity=0 if spot else 100,
        spot_allocation_strategy="capacity-optimized-prioritized",
    )
    overrides = [Group.LaunchTemplateOverridesProperty(instance_type=each) for each in colour.types]
    template = Group.LaunchTemplateProperty(launch_template_specification=by, overrides=overrides)
    return {
        "mixed_instances_policy": Group.MixedInstancesPolicyProperty(
            instances_distribution=distribution, launch_template=template
        )
    }


def _changed(colour: Colour) -> CfnUpdatePolicy:
    """New instances come before old ones go, unless capacity was bought ahead: then there is no room for both. Sizes
    that a rollout has set stay, as long as the template's own do.
    """
    bought = colour.capacity.kind in ("reservation", "capacity-block")
    preferences = CfnAutoScalingInstanceRefreshPreferences(
        min_healthy_percentage=50 if bought else 100,
        max_healthy_percentage=100 if bought else 125,
        instance_warmup=colour.ready_within,
        skip_matching=True,
        alarm_specification=CfnAutoScalingInstanceRefreshAlarmSpecification(alarms=[colour.alarm]),
    )
    return CfnUpdatePolicy(
        auto_scaling_instance_refresh=CfnAutoScalingInstanceRefresh(strategy="Rolling", preferences=preferences),
        auto_scaling_scheduled_action=CfnAutoScalingScheduledAction(ignore_unmodified_group_size_properties=True),
    )


def _open_with_the_block(scope: Construct, id_: str, made: Group, colour: Colour, block: CapacityBlock) -> None:
    def at(name: str, moment: datetime, desired: int, most: int) -> None:
        aws_autoscaling.CfnScheduledAction(
            scope,
            f"{id_}-{name}",
            auto_scaling_group_name=made.ref,
            start_time=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            min_size=0,
            desired_capacity=desired,
            max_size=most,
        )

    if colour.serves_first:
        at("opens", block.start, colour.size.desired, colour.size.max)
    at("closes", block.end - DRAINED_BEFORE_THE_END, 0, 0)


def _keep_warm(scope: Construct, id_: str, made: Group, pool: WarmPool) -> None:
    """Each colour has one: the next rollout begins in the other."""
    aws_autoscaling.CfnWarmPool(
        scope,
        f"{id_}-warm",
        auto_scaling_group_name=made.ref,
        min_size=pool.min,
        pool_state="Stopped",
        instance_reuse_policy=aws_autoscaling.CfnWarmPool.InstanceReusePolicyProperty(reuse_on_scale_in=pool.reuse),
    )
