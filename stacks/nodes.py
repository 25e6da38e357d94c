"""Nodes: groups that EKS manages, of the releases in the lock file, launched as their row of the catalogue says."""

from dataclasses import dataclass
from datetime import UTC
from typing import Final

from aws_cdk import aws_ec2, aws_eks, aws_iam
from constructs import Construct

from nxpipe.pipeline.config.cluster import SYSTEM, NodeGroup
from nxpipe.pipeline.config.fleets import Capacity, CapacityBlock
from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.stacks.block import Turn, drained_at, keep_turns
from nxpipe.stacks.handles import NetworkHandle
from nxpipe.stacks.launch import Machine, Template, launch_template
from nxpipe.stacks.names import NEURON, cluster_name
from nxpipe.stacks.project_tag import PROJECT_TAG

_SYSTEM_NODES: Final = 2  # in two zones, so that names resolve when one is lost
_SYSTEM_ROOT_GIB: Final = 50
_ROOT_GIB: Final = 500  # Neuron images have tens of gigabytes, and several stay on a node
_KINDS: Final = {"capacity-block": "CAPACITY_BLOCK", "spot": "SPOT"}  # all others are on demand

_Group = aws_eks.CfnNodegroup


@dataclass(frozen=True)
class Home:
    """What all groups of a cluster share."""

    project: str
    cluster: aws_eks.CfnCluster
    group: aws_ec2.ISecurityGroup  # which EKS has made, and in which it expects every node
    role: aws_iam.Role
    lock: ClusterLock
    network: NetworkHandle


class SystemNodes(Construct):
    """Nodes without accelerators, for what the cluster itself needs: others would stand idle under it."""

    def __init__(self, scope: Construct, id_: str, *, home: Home, instance_type: str) -> None:
        super().__init__(scope, id_)
        template = _template(self, home, SYSTEM, instance_type, [home.group], root_gib=_SYSTEM_ROOT_GIB)
        self.made = _Group(
            self,
            "Group",
            nodegroup_name=SYSTEM,
            ami_type="AL2023_x86_64_STANDARD",
            release_version=home.lock.system.release,
            capacity_type="ON_DEMAND",
            subnets=[each.subnet_id for each in home.network.subnets.values()],
            # One more than there are while a release is replaced.
            scaling_config=_Group.ScalingConfigProperty(
                min_size=_SYSTEM_NODES, desired_size=_SYSTEM_NODES, max_size=_SYSTEM_NODES + 1
            ),
            **_common(home, template),
        )


class NeuronNodes(Construct):
    """One group."""

    def __init__(self, scope: Construct, id_: str, *, home: Home, group: NodeGroup) -> None:
        super().__init__(scope, id_)
        near = aws_ec2.CfnPlacementGroup(self, "Near", strategy="cluster") if group.near else None
        groups = [home.group, home.network.efa_group] if group.efa else [home.group]
        template = _template(
            self, home, group.name, group.instance_type, groups, near=near, capacity=group.capacity, efa=group.efa
        )
        self.made = _Group(
            self,
            "Group",
            nodegroup_name=group.name,
            ami_type="AL2023_x86_64_NEURON",
            release_version=home.lock.neuron.release,
            capacity_type=_KINDS.get(group.capacity.kind, "ON_DEMAND"),
            subnets=[home.network.subnets[group.zone].subnet_id],
            labels={"nxpipe/group": group.name},
            taints=[_Group.TaintProperty(key=NEURON, value="true", effect="NO_SCHEDULE")],
            scaling_config=_Group.ScalingConfigProperty(
                min_size=group.size.min, desired_size=group.size.desired, max_size=group.size.max
            ),
            **_common(home, template),
        )
        if isinstance(group.capacity, CapacityBlock):
            self._keep_to_its_time(home, group, group.capacity)

    def _keep_to_its_time(self, home: Home, group: NodeGroup, block: CapacityBlock) -> None:
        """What was bought is bought as a whole, so all of it runs from the first minute on."""
        name = cluster_name(home.project)
        most = group.size.max

        def sized(count: int) -> dict[str, object]:
            size = {"MinSize": 0, "DesiredSize": count, "MaxSize": most}
            return {"ClusterName": name, "NodegroupName": group.name, "ScalingConfig": size}

        call, may = "eks:updateNodegroupConfig", {"eks:UpdateNodegroupConfig": self.made.attr_arn}
        turns = (
            Turn("opens", block.start.astimezone(UTC), call, sized(most), may),
            Turn("drains", drained_at(block), call, sized(0), may),
        )
        keep_turns(self, f"{home.project}-nodes-{group.name}", block, turns)


def _common(home: Home, template: Template) -> dict[str, object]:
    return {
        "cluster_name": home.cluster.ref,
        "version": home.lock.kubernetes,
        "node_role": home.role.role_arn,
        "launch_template": _Group.LaunchTemplateSpecificationProperty(
            id=template.ref, version=template.attr_latest_version_number
        ),
        "update_config": _Group.UpdateConfigProperty(max_unavailable=1),
        "node_repair_config": _Group.NodeRepairConfigProperty(enabled=True),
    }


def _template(
    scope: Construct,
    home: Home,
    name: str,
    instance_type: str,
    groups: list[aws_ec2.ISecurityGroup],
    *,
    near: aws_ec2.CfnPlacementGroup | None = None,
    capacity: Capacity | None = None,
    efa: bool = False,
    root_gib: int = _ROOT_GIB,
) -> Template:
    machine = Machine(
        name=f"{home.project}-nodes-{name}",
        image=None,
        profile=None,
        groups=groups,
        user_data="",  # how a node joins is added by EKS
        root_device="/dev/xvda",  # of Amazon Linux
        root_gib=root_gib,
        kubernetes=True,
        near=near,
        tags={PROJECT_TAG: home.project},
    )
    return launch_template(scope, "Template", machine, instance_type=instance_type, capacity=capacity, efa=efa)
