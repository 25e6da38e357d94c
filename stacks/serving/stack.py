"""Serving stack: two Auto Scaling groups behind a load balancer; purchase options, warm pools, lifecycle hooks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

from aws_cdk import (
    CfnAutoScalingInstanceRefresh,
    CfnAutoScalingInstanceRefreshAlarmSpecification,
    CfnAutoScalingInstanceRefreshPreferences,
    CfnAutoScalingScheduledAction,
    CfnOutput,
    CfnParameter,
    CfnUpdatePolicy,
    Stack,
    aws_autoscaling,
    aws_ec2,
    aws_iam,
    aws_logs,
)
from constructs import Construct

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.capacity import CapacityBlock, ServingCapacity, ServingOnDemand, Size, WarmPool
from nxpipe.pipeline.config.serving_fleet import Standby
from nxpipe.stacks.handles import NetworkHandle, ServeHandle, StoreHandle
from nxpipe.stacks.iam import allow_sessions, read_artifacts, use_compile_cache
from nxpipe.stacks.launch import Machine, launch_template
from nxpipe.stacks.names import PROJECT_TAG, SMOKE_END, fleet_log
from nxpipe.stacks.project import (
    current_time,
    description_of,
    log_group,
    tag_project,
    tag_rehearsal,
    unlocked_agent,
    warn_of_ended_block,
    warn_of_unknown_reservation,
)
from nxpipe.stacks.serving.load_balancer import Balancer
from nxpipe.stacks.user_data.scripts import Agent, Serving

Group: TypeAlias = aws_autoscaling.CfnAutoScalingGroup


@dataclass(frozen=True)
class InstanceGroup:
    """Settings of one Auto Scaling group of a fleet."""

    name: str
    template: aws_ec2.CfnLaunchTemplate
    types: tuple[str, ...]
    capacity: ServingCapacity
    size: Size
    zone: str | None  # None: all zones with a subnet
    serves_first: bool  # other groups are empty until a rollout scales them up
    targets: str  # the ARN of its target group
    hook: str | None
    hook_within: int  # seconds until the hook abandons an instance
    grace: int  # seconds in service before a failed health check counts
    warm_up: int  # seconds in service before an instance refresh goes on

    @property
    def alarm(self) -> str:
        """Name of the alarm that stops an instance refresh."""
        return f"{self.name}-errors"


def instance_group(scope: Construct, id_: str, colour: InstanceGroup, network: NetworkHandle) -> Group:
    """Auto Scaling group, with schedules for a capacity block and a warm pool if configured."""
    block = colour.capacity if isinstance(colour.capacity, CapacityBlock) else None
    filled = colour.serves_first and (block is None or block.is_open(current_time()))
    desired = colour.size.desired if filled else 0
    group = Group(
        scope,
        id_,
        auto_scaling_group_name=colour.name,
        min_size="0",  # a rollout scales the old environment to zero, and itself respects `size.min`
        desired_capacity=str(desired),
        max_size=str(colour.size.max),
        vpc_zone_identifier=[
            subnet.subnet_id for zone, subnet in network.subnets.items() if colour.zone in (None, zone)
        ],
        target_group_arns=[colour.targets],
        health_check_type="ELB",
        health_check_grace_period=colour.grace,
        capacity_rebalance=True if colour.capacity.kind == "spot" else None,
        lifecycle_hook_specification_list=_hooks(colour),
        metrics_collection=[Group.MetricsCollectionProperty(granularity="1Minute")],
        tags=[Group.TagPropertyProperty(key="Name", value=colour.name, propagate_at_launch=True)],
        **_launch_settings(colour),
    )
    group.cfn_options.update_policy = _update_policy(colour)
    if block is not None:
        _add_block_schedule(scope, id_, group, colour, block)
    if isinstance(colour.capacity, ServingOnDemand) and colour.capacity.warm_pool:
        _add_warm_pool(scope, id_, group, colour.capacity.warm_pool)
    return group


def _hooks(colour: InstanceGroup) -> list[Any] | None:
    """Lifecycle hook as a property of the group: a separate resource would be created after the first instances."""
    if colour.hook is None:
        return None
    return [
        Group.LifecycleHookSpecificationProperty(
            lifecycle_hook_name=colour.hook,
            lifecycle_transition="autoscaling:EC2_INSTANCE_LAUNCHING",
            heartbeat_timeout=colour.hook_within,
            default_result="ABANDON",
        )
    ]


def _launch_settings(colour: InstanceGroup) -> dict[str, Any]:
    """Launch template, or mixed-instances policy for several types or spot."""
    specification = Group.LaunchTemplateSpecificationProperty(
        launch_template_id=colour.template.ref, version=colour.template.attr_latest_version_number
    )
    spot = colour.capacity.kind == "spot"
    if len(colour.types) == 1 and not spot:
        return {"launch_template": specification}
    distribution = Group.InstancesDistributionProperty(
        on_demand_allocation_strategy="prioritized",
        on_demand_base_capacity=colour.capacity.on_demand_base if colour.capacity.kind == "spot" else 0,
        on_demand_percentage_above_base_capacity=0 if spot else 100,
        spot_allocation_strategy="capacity-optimized-prioritized",
    )
    overrides = [Group.LaunchTemplateOverridesProperty(instance_type=type_) for type_ in colour.types]
    template = Group.LaunchTemplateProperty(launch_template_specification=specification, overrides=overrides)
    return {
        "mixed_instances_policy": Group.MixedInstancesPolicyProperty(
            instances_distribution=distribution, launch_template=template
        )
    }


def _update_policy(colour: InstanceGroup) -> CfnUpdatePolicy:
    """Update policy: new instances start before old ones stop, unless capacity is reserved, which limits their number.

    Sizes that a rollout has set are kept while the sizes in the template do not change.
    """
    reserved = colour.capacity.kind in ("reservation", "capacity-block")
    preferences = CfnAutoScalingInstanceRefreshPreferences(
        min_healthy_percentage=50 if reserved else 100,
        max_healthy_percentage=100 if reserved else 125,
        instance_warmup=colour.warm_up,
        skip_matching=True,
        alarm_specification=CfnAutoScalingInstanceRefreshAlarmSpecification(alarms=[colour.alarm]),
    )
    return CfnUpdatePolicy(
        auto_scaling_instance_refresh=CfnAutoScalingInstanceRefresh(strategy="Rolling", preferences=preferences),
        auto_scaling_scheduled_action=CfnAutoScalingScheduledAction(ignore_unmodified_group_size_properties=True),
    )


def _add_block_schedule(scope: Construct, id_: str, group: Group, colour: InstanceGroup, block: CapacityBlock) -> None:
    """Scheduled actions, except past ones, which EC2 Auto Scaling refuses. In an open block the group's own desired
    capacity takes the place of the first action.
    """

    def schedule(name: str, moment: datetime, desired: int, maximum: int) -> None:
        if moment <= current_time():
            return
        aws_autoscaling.CfnScheduledAction(
            scope,
            f"{id_}-{name}",
            auto_scaling_group_name=group.ref,
            start_time=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            min_size=0,
            desired_capacity=desired,
            max_size=maximum,
        )

    if colour.serves_first:
        schedule("opens", block.start, colour.size.desired, colour.size.max)
    schedule("closes", block.drained, 0, 0)


def _add_warm_pool(scope: Construct, id_: str, group: Group, pool: WarmPool) -> None:
    """Warm pool of one environment; both have one, because rollouts alternate between them.

    Without a maximum the pool has as many instances as the group may grow by, `max - desired`. Minimum and maximum of
    the same value give it that very size, also when a rollout changes the group's desired capacity.
    """
    aws_autoscaling.CfnWarmPool(
        scope,
        f"{id_}-warm",
        auto_scaling_group_name=group.ref,
        min_size=pool.min,
        max_group_prepared_capacity=pool.min,
        pool_state="Stopped",
        instance_reuse_policy=aws_autoscaling.CfnWarmPool.InstanceReusePolicyProperty(reuse_on_scale_in=pool.reuse),
    )


def end_instances(stack: Stack, groups: Mapping[str, Group]) -> None:
    """Hard stop of a smoke test: at the time in the parameter, the groups become empty and stay empty.

    EC2 Auto Scaling does it without the command that deployed the stack. The parameter gives a resumed test a later
    time without another synthesis.
    """
    end = CfnParameter(
        stack,
        SMOKE_END,
        type="String",
        allowed_pattern=r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
        description="The time at which the instances of the smoke test end",
    )
    for colour, group in groups.items():
        aws_autoscaling.CfnScheduledAction(
            stack,
            f"{colour.capitalize()}-hard-stop",
            auto_scaling_group_name=group.ref,
            start_time=end.value_as_string,
            min_size=0,
            desired_capacity=0,
            max_size=0,
        )


_BOOT: Final = 600  # seconds: from the launch to the agent's start, with five minutes for dpkg's lock
# Of fleets whose server the agent supervises: it answers before the instance is in service. In any other fleet it may
# still load the model, so that both are `ready_within`.
_GRACE: Final = 60  # seconds: the first health checks of the load balancer
_WARM_UP: Final = 300  # seconds: three periods of the alarm that stops a refresh, and the delay of its metrics
BLUE: Final = "blue"  # serves after the first deployment
GREEN: Final = "green"
STANDBY: Final = "standby"


@dataclass(frozen=True)
class Software:
    """Image and agent of instances, by id or digest, so that all instances of a deployment are equal."""

    image: str  # an AMI of the lock file, or an SSM reference
    root_device: str  # of the image
    agent: str | None  # the SHA-256 of a bundle in the artifact bucket; None: not locked yet
    folder: Path  # of nxpipe.toml; relative paths start there


class ServeStack(Stack):
    """One serving fleet: load balancer, Auto Scaling groups, launch template, instance role and log."""

    handle: ServeHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        config: Config,
        fleet: ServingFleet,
        software: Software,
        network: NetworkHandle,
        store: StoreHandle,
        prefix: str,
        smoke: bool = False,
        **kwargs: Any,
    ) -> None:
        description = description_of(f"Fleet {fleet.name}", config.project.name, rehearsal=fleet.rehearsal)
        super().__init__(scope, id_, description=description, **kwargs)
        self._config, self._fleet, self._network = config, fleet, network
        self._name = f"{config.project.name}-{fleet.name}"
        self._instances = self._security_group("Instances", "Instances")
        self._balancer = Balancer(
            self,
            "Front",
            fleet=fleet,
            colours=(BLUE, GREEN, *([STANDBY] if fleet.standby else [])),
            network=network,
            store=store,
            instances=self._instances,
        )
        if config.rollout.shadow is not None and not fleet.updates.are_followed:
            self._allow_mirrored_requests()
        template = self._template(software, store, prefix)
        groups = {colour: self._group(colour, template) for colour in (BLUE, GREEN)}
        if fleet.standby:
            groups[STANDBY] = self._standby(fleet.standby)
        if smoke:
            end_instances(self, groups)
        # Launches of a fleet that scales overlap: the next one may begin when one is about to end.
        overlap = 2 if fleet.scaling else 1
        self.handle = ServeHandle(
            fleet=fleet.name,
            load_balancer=self._balancer.load_balancer,
            listener=self._balancer.listener,
            rule=self._balancer.rule,
            target_groups=self._balancer.target_groups,
            groups=groups,
            rehearsal=fleet.rehearsal,
            ready_within=math.ceil(self._hook_within / 60) * overlap,
            follows_channel=fleet.updates.are_followed,
        )
        tag_project(self, config.project.name)
        if fleet.rehearsal:
            tag_rehearsal(self)
        warn_of_ended_block(self, fleet.capacity)
        warn_of_unknown_reservation(self, fleet)
        name = self._balancer.load_balancer.load_balancer_dns_name
        CfnOutput(self, "Address", value=name, description=f"DNS name of {fleet.name} within the network")

    @property
    def hook(self) -> str:
        """Name of the lifecycle hook, which the agent completes."""
        return f"{self._name}-ready"

    @property
    def _ready_within(self) -> int:
        return int(self._fleet.ready_within.total_seconds())

    @property
    def _hook_within(self) -> int:
        """The agent abandons the instance after `ready_within`; the hook itself, if there is no agent that could."""
        return self._ready_within + _BOOT

    @property
    def _tags(self) -> dict[str, str]:
        """Tags of instances, volumes and network interfaces, by which the budget counts them."""
        return {PROJECT_TAG: self._config.project.name}

    def _security_group(self, id_: str, members: str) -> aws_ec2.SecurityGroup:
        """Security group with HTTPS egress, for AWS services."""
        group = aws_ec2.SecurityGroup(
            self,
            id_,
            vpc=self._network.vpc,
            description=f"{members} of fleet {self._fleet.name}",
            allow_all_outbound=False,
        )
        group.add_egress_rule(aws_ec2.Peer.any_ipv4(), aws_ec2.Port.tcp(443), "AWS")
        return group

    def _allow_mirrored_requests(self) -> None:
        """In a shadow phase the stable instances send copies of requests to those of the candidate."""
        port = aws_ec2.Port.tcp(self._fleet.port)
        self._instances.add_ingress_rule(self._instances, port, "mirrored requests")
        self._instances.add_egress_rule(self._instances, port, "mirrored requests")

    def _template(self, software: Software, store: StoreHandle, prefix: str) -> aws_ec2.CfnLaunchTemplate:
        role = self._role("Role", "Instances")
        read_artifacts(store, role, prefix)
        self._grant_hook_completion(role)
        if self._fleet.updates.are_followed:
            self._grant_turns(role)
        if self._fleet.ssm:
            allow_sessions(role)
        if self._fleet.compile_cache:
            use_compile_cache(self._fleet.compile_cache, role)
        bucket = f"s3://{store.bucket.bucket_name}"
        agent = software.agent or unlocked_agent(self)
        serving = Serving(
            config=self._config,
            fleet=self._fleet,
            folder=software.folder,
            region=self.region,
            store_url=f"{bucket}/{prefix}".rstrip("/"),
            hook=self.hook,
            log=self._log(role).log_group_name,
            agent=Agent(f"{bucket}/{prefix}agents/{agent}.tar", agent),
        )
        machine = Machine(
            name=self._name,
            image=software.image,
            profile=self._profile("Profile", role),
            groups=[self._instances],
            user_data=serving.script(),
            root_device=software.root_device,
            root_gib=self._fleet.volume_gib,
            root_iops=self._fleet.iops,
            root_throughput=self._fleet.throughput,
            tags=self._tags,
        )
        types = self._fleet.instance_types
        return launch_template(self, "Template", machine, instance_type=types[0], capacity=self._fleet.capacity)

    def _role(self, id_: str, members: str) -> aws_iam.Role:
        return aws_iam.Role(
            self,
            id_,
            description=f"{members} of fleet {self._fleet.name}",
            path="/nxpipe/",
            assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"),
        )

    def _profile(self, id_: str, role: aws_iam.Role) -> aws_iam.CfnInstanceProfile:
        profile = aws_iam.CfnInstanceProfile(self, id_, path="/nxpipe/", roles=[role.role_name])
        if policy := role.node.try_find_child("DefaultPolicy"):
            profile.node.add_dependency(policy)  # no instance starts without its permissions
        return profile

    def _grant_hook_completion(self, role: aws_iam.Role) -> None:
        """Permit completion of the hook, by group name: the ARN's UUID is unknown before the group exists."""
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["autoscaling:CompleteLifecycleAction"], resources=self._group_arns)
        )
        # By which an agent distinguishes a hook that is still to come; it supports no resource-level permissions.
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["autoscaling:DescribeAutoScalingInstances"], resources=["*"])
        )

    def _grant_turns(self, role: aws_iam.Role) -> None:
        """Permit what an instance needs to take the next artifact over: to see its group, to claim its turn, and to
        leave service, for a while or for a successor."""
        leaving = {
            "swap": ["autoscaling:EnterStandby", "autoscaling:ExitStandby"],
            "replace": ["autoscaling:TerminateInstanceInAutoScalingGroup"],
        }[self._fleet.updates.policy]
        actions = ["autoscaling:SetInstanceProtection", *leaving]
        role.add_to_principal_policy(aws_iam.PolicyStatement(actions=actions, resources=self._group_arns))
        # It supports no resource-level permissions.
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["autoscaling:DescribeAutoScalingGroups"], resources=["*"])
        )

    @property
    def _group_arns(self) -> list[str]:
        names = [f"autoScalingGroup:*:autoScalingGroupName/{self._name}-{colour}" for colour in (BLUE, GREEN)]
        return [f"arn:{self.partition}:autoscaling:{self.region}:{self.account}:{name}" for name in names]

    def _log(self, role: aws_iam.Role) -> aws_logs.LogGroup:
        """Log of instances, and of device metrics, from which CloudWatch extracts the fleet's metrics."""
        name = fleet_log(self._config.project.name, self._fleet.name)
        group = log_group(self, "Log", name, days=self._config.observe.log_retention)
        group.grant_write(role)
        return group

    def _group(self, colour: str, template: aws_ec2.CfnLaunchTemplate) -> Group:
        fleet = self._fleet
        settings = InstanceGroup(
            name=f"{self._name}-{colour}",
            template=template,
            types=fleet.instance_types,
            capacity=fleet.capacity,
            size=fleet.size,
            zone=fleet.zone,
            serves_first=colour == BLUE,
            targets=self._balancer.target_groups[colour].target_group_arn,
            hook=self.hook,
            hook_within=self._hook_within,
            grace=_GRACE if fleet.command != () else self._ready_within,
            warm_up=_WARM_UP if fleet.command != () else self._ready_within,
        )
        return self._create(colour, settings)

    def _standby(self, standby: Standby) -> Group:
        """Standby group. Its image serves the model at start: it has no agent and no lifecycle hook."""
        machine = Machine(
            name=f"{self._name}-{STANDBY}",
            image=standby.image,
            profile=self._profile("StandbyProfile", self._role("StandbyRole", "Standby instances")),
            groups=[self._instances],
            user_data="",
            tags=self._tags,
        )
        settings = InstanceGroup(
            name=machine.name,
            template=launch_template(self, "StandbyTemplate", machine, instance_type=standby.instance_type),
            types=(standby.instance_type,),
            capacity=ServingOnDemand(kind="on-demand"),
            size=standby.size,
            zone=None,
            serves_first=True,
            targets=self._balancer.target_groups[STANDBY].target_group_arn,
            hook=None,
            hook_within=0,
            grace=self._ready_within,
            warm_up=self._ready_within,
        )
        return self._create(STANDBY, settings)

    def _create(self, colour: str, settings: InstanceGroup) -> Group:
        """Create the group after its listener rules, without which targets have no health checks, and after the alarm
        that its instance refresh names.
        """
        group = instance_group(self, colour.capitalize(), settings, self._network)
        group.node.add_dependency(self._balancer.rule, self._balancer.direct[colour])
        threshold = self._config.rollout.guards.max_error_rate
        group.node.add_dependency(self._balancer.errors(colour, settings.alarm, threshold))
        return group
