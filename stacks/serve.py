"""A serving fleet: two groups of instances behind a load balancer, of which one serves and the other is what comes
next; maybe a third, of GPUs, to go back to.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aws_cdk import CfnOutput, Stack, aws_ec2, aws_iam, aws_logs
from constructs import Construct

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.fleets import ServingOnDemand, Standby
from nxpipe.stacks.balancer import Balancer
from nxpipe.stacks.grants import mount_cache, read_artifacts
from nxpipe.stacks.groups import Colour, Group, group
from nxpipe.stacks.handles import CacheHandle, NetworkHandle, ServeHandle, StoreHandle
from nxpipe.stacks.kept_log import kept_log
from nxpipe.stacks.launch import Machine, launch_template
from nxpipe.stacks.project_tag import tag_project
from nxpipe.stacks.unlocked import unlocked_agent
from nxpipe.stacks.user_data.serving import Agent, Cache, Serving

BLUE: Final = "blue"  # serves from the first day on
GREEN: Final = "green"
STANDBY: Final = "standby"


@dataclass(frozen=True)
class Software:
    """What instances start with, each named by what it is and not by where something newer might be."""

    image: str  # an AMI of the lock, or what stands for one
    agent: str | None  # the SHA-256 of a bundle in the artifact bucket; None: not locked yet
    folder: Path  # of nxpipe.toml, where relative paths of it start


class ServeStack(Stack):
    """One fleet."""

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
        cache: CacheHandle | None,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, id_, description=f"Fleet {fleet.name} of {config.project.name}", **kwargs)
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
        template = self._template(software, store, prefix, cache)
        groups = {colour: self._group(colour, template) for colour in (BLUE, GREEN)}
        if fleet.standby:
            groups[STANDBY] = self._standby(fleet.standby)
        self.handle = ServeHandle(
            fleet=fleet.name,
            load_balancer=self._balancer.load_balancer,
            listener=self._balancer.listener,
            rule=self._balancer.rule,
            target_groups=self._balancer.target_groups,
            groups=groups,
        )
        tag_project(self, config.project.name)
        name = self._balancer.load_balancer.load_balancer_dns_name
        CfnOutput(self, "Address", value=name, description=f"Where {fleet.name} answers, from inside of the network")

    @property
    def hook(self) -> str:
        """The agent answers it."""
        return f"{self._name}-ready"

    def _security_group(self, id_: str, what: str) -> aws_ec2.SecurityGroup:
        """What instances call is AWS alone: by endpoints where the network is closed."""
        made = aws_ec2.SecurityGroup(
            self,
            id_,
            vpc=self._network.vpc,
            description=f"{what} of fleet {self._fleet.name}",
            allow_all_outbound=False,
        )
        made.add_egress_rule(aws_ec2.Peer.any_ipv4(), aws_ec2.Port.tcp(443), "AWS")
        return made

    def _template(
        self, software: Software, store: StoreHandle, prefix: str, cache: CacheHandle | None
    ) -> aws_ec2.CfnLaunchTemplate:
        role = self._role("Role", "Instances")
        read_artifacts(store, role)
        self._let_answer_the_hook(role)
        sdk = self._config.amis.sdk[0]
        if cache:
            mount_cache(cache, sdk, role)
            self._instances.add_egress_rule(aws_ec2.Peer.ipv4(self._network.cidr), aws_ec2.Port.tcp(2049), "the cache")
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
            cache=Cache(cache.file_system.file_system_id, cache.access_points[sdk].access_point_id) if cache else None,
        )
        machine = Machine(
            name=self._name,
            image=software.image,
            profile=self._profile("Profile", role),
            groups=[self._instances],
            user_data=serving.script(),
        )
        types = self._fleet.instance_types
        return launch_template(self, "Template", machine, instance_type=types[0], capacity=self._fleet.capacity)

    def _role(self, id_: str, what: str) -> aws_iam.Role:
        return aws_iam.Role(
            self,
            id_,
            description=f"{what} of fleet {self._fleet.name}",
            path="/nxpipe/",
            assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"),
        )

    def _profile(self, id_: str, role: aws_iam.Role) -> aws_iam.CfnInstanceProfile:
        made = aws_iam.CfnInstanceProfile(self, id_, path="/nxpipe/", roles=[role.role_name])
        if policy := role.node.try_find_child("DefaultPolicy"):
            made.node.add_dependency(policy)  # no instance starts without its permissions
        return made

    def _let_answer_the_hook(self, role: aws_iam.Role) -> None:
        """By the names of the groups; what stands before a name in the ARN is only known when the group is made."""
        names = [f"autoScalingGroup:*:autoScalingGroupName/{self._name}-{colour}" for colour in (BLUE, GREEN)]
        arns = [f"arn:{self.partition}:autoscaling:{self.region}:{self.account}:{name}" for name in names]
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=["autoscaling:CompleteLifecycleAction"], resources=arns)
        )

    def _log(self, role: aws_iam.Role) -> aws_logs.LogGroup:
        """What the devices do, from which CloudWatch takes the fleet's metrics."""
        kept = kept_log(self, "Log", f"/nxpipe/{self._config.project.name}/{self._fleet.name}")
        kept.grant_write(role)
        return kept

    def _group(self, colour: str, template: aws_ec2.CfnLaunchTemplate) -> Group:
        fleet = self._fleet
        described = Colour(
            name=f"{self._name}-{colour}",
            template=template,
            types=fleet.instance_types,
            capacity=fleet.capacity,
            size=fleet.size,
            serves_first=colour == BLUE,
            targets=self._balancer.target_groups[colour].target_group_arn,
            ready_within=int(fleet.ready_within.total_seconds()),
            hook=self.hook,
        )
        return self._made(colour, described)

    def _standby(self, standby: Standby) -> Group:
        """Its image serves the model when it starts: there is no agent, and nothing to wait for but its health."""
        machine = Machine(
            name=f"{self._name}-{STANDBY}",
            image=standby.image,
            profile=self._profile("StandbyProfile", self._role("StandbyRole", "Standby instances")),
            groups=[self._instances],
            user_data="",
        )
        described = Colour(
            name=machine.name,
            template=launch_template(self, "StandbyTemplate", machine, instance_type=standby.instance_type),
            types=(standby.instance_type,),
            capacity=ServingOnDemand(kind="on-demand"),
            size=standby.size,
            serves_first=True,
            targets=self._balancer.target_groups[STANDBY].target_group_arn,
            ready_within=int(self._fleet.ready_within.total_seconds()),
            hook=None,
        )
        return self._made(STANDBY, described)

    def _made(self, colour: str, described: Colour) -> Group:
        """Behind its rules, for nobody asks for the health of targets without one; and behind the alarm that a refresh
        asks for.
        """
        made = group(self, colour.capitalize(), described, self._network)
        made.node.add_dependency(self._balancer.rule, self._balancer.direct[colour])
        most = self._config.rollout.guards.max_error_rate
        made.node.add_dependency(self._balancer.errors(colour, described.alarm, most))
        return made
