"""EKS cluster: control plane, managed node groups with accelerators, and add-ons of the locked versions."""

from dataclasses import dataclass
from datetime import UTC
from typing import Any, Final

from aws_cdk import CfnOutput, Stack, aws_ec2, aws_eks, aws_iam, aws_logs
from constructs import Construct

from nxpipe.pipeline.config.capacity import Capacity, CapacityBlock
from nxpipe.pipeline.config.cluster import SYSTEM, Cluster, NodeGroup
from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.stacks.capacity_block import ScheduledCall, add_schedules
from nxpipe.stacks.handles import CacheHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.iam import mount_cache, own_account_service, pod_role, read_artifacts, wait_for_permissions
from nxpipe.stacks.launch import Machine, Template, launch_template
from nxpipe.stacks.names import NAMESPACE, NEURON, SERVICE_ACCOUNT, cluster_name, node_profile
from nxpipe.stacks.project import PROJECT_TAG, current_time, log_group, tag_project, warn_of_ended_block
from nxpipe.stacks.references import by_value

# Nodes need these add-ons to become ready; the others need nodes to run on.
_BEFORE_NODES: Final = ("eks-pod-identity-agent", "kube-proxy", "vpc-cni")
# The monitoring agent reports failures of accelerators, which node repair reacts to; the kubelet does not know them.
_AFTER_NODES: Final = ("aws-efs-csi-driver", "coredns", "eks-node-monitoring-agent")

_DESCRIBE_CALLS: Final = ("DescribeAccessPoints", "DescribeFileSystems", "DescribeMountTargets")


class Addons(Construct):
    """EKS add-ons of the locked versions, with their roles. The EFS driver may mount `cache`."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        cluster: aws_eks.CfnCluster,
        lock: ClusterLock,
        cache: CacheHandle,
    ) -> None:
        super().__init__(scope, id_)
        addresses = pod_role(self, "Addresses", project, "Gives pods their addresses")
        addresses.add_managed_policy(aws_iam.ManagedPolicy.from_aws_managed_policy_name("AmazonEKS_CNI_Policy"))
        files = self._files(project, cache)
        accounts = {
            "vpc-cni": {"aws-node": addresses},
            "aws-efs-csi-driver": {"efs-csi-controller-sa": files, "efs-csi-node-sa": files},
        }
        addons = {
            name: self._addon(name, lock.addons[name], cluster, accounts.get(name, {}))
            for name in (*_BEFORE_NODES, *_AFTER_NODES)
        }
        self.before_nodes = [addons[name] for name in _BEFORE_NODES]
        self.after_nodes = [addons[name] for name in _AFTER_NODES]

    def _addon(
        self, name: str, version: str, cluster: aws_eks.CfnCluster, accounts: dict[str, aws_iam.Role]
    ) -> aws_eks.CfnAddon:
        identities = [
            aws_eks.CfnAddon.PodIdentityAssociationProperty(service_account=account, role_arn=role.role_arn)
            for account, role in accounts.items()
        ]
        addon = aws_eks.CfnAddon(
            self,
            name,
            addon_name=name,
            addon_version=version,
            cluster_name=cluster.ref,
            pod_identity_associations=identities or None,
            resolve_conflicts="OVERWRITE",  # discards manual changes
        )
        for role in accounts.values():
            wait_for_permissions(addon, role)
        return addon

    def _files(self, project: str, cache: CacheHandle) -> aws_iam.Role:
        role = pod_role(self, "Files", project, "Mounts the compile cache in pods")
        for version in cache.access_points:
            mount_cache(cache, version, role)
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(
                actions=[f"elasticfilesystem:{call}" for call in _DESCRIBE_CALLS],
                resources=[by_value(self, cache.file_system.file_system_arn)],
            )
        )
        return role


_SYSTEM_NODES: Final = 2  # in two zones, so that DNS survives the loss of one
_SYSTEM_ROOT_GIB: Final = 50
_ROOT_GIB: Final = 500  # Neuron images have tens of gigabytes, and a node keeps several
_CAPACITY_TYPES: Final = {"capacity-block": "CAPACITY_BLOCK", "spot": "SPOT"}  # all others are on demand

_Group = aws_eks.CfnNodegroup


@dataclass(frozen=True)
class ClusterContext:
    """Arguments that all node groups of a cluster share."""

    project: str
    cluster: aws_eks.CfnCluster
    group: aws_ec2.ISecurityGroup  # the cluster security group, created by EKS, of which every node is a member
    role: aws_iam.Role
    lock: ClusterLock
    network: NetworkHandle


class SystemNodes(Construct):
    """Node group without accelerators, for the cluster's own components."""

    def __init__(self, scope: Construct, id_: str, *, context: ClusterContext, instance_type: str) -> None:
        super().__init__(scope, id_)
        template = _template(self, context, SYSTEM, instance_type, [context.group], root_gib=_SYSTEM_ROOT_GIB)
        self.node_group = _Group(
            self,
            "Group",
            nodegroup_name=SYSTEM,
            ami_type="AL2023_x86_64_STANDARD",
            release_version=context.lock.system.release,
            capacity_type="ON_DEMAND",
            subnets=[subnet.subnet_id for subnet in context.network.subnets.values()],
            # One more during a node update.
            scaling_config=_Group.ScalingConfigProperty(
                min_size=_SYSTEM_NODES, desired_size=_SYSTEM_NODES, max_size=_SYSTEM_NODES + 1
            ),
            **_common(context, template),
        )


class NeuronNodes(Construct):
    """Node group of one accelerator instance type in one zone."""

    def __init__(self, scope: Construct, id_: str, *, context: ClusterContext, group: NodeGroup) -> None:
        super().__init__(scope, id_)
        near = aws_ec2.CfnPlacementGroup(self, "Near", strategy="cluster") if group.near else None
        groups = [context.group, context.network.efa_group] if group.efa else [context.group]
        template = _template(
            self,
            context,
            group.name,
            group.instance_type,
            groups,
            near=near,
            capacity=group.capacity,
            efa=group.efa,
            user_data=group.user_data,
        )
        self.node_group = _Group(
            self,
            "Group",
            nodegroup_name=group.name,
            ami_type="AL2023_x86_64_NEURON",
            release_version=context.lock.neuron.release,
            capacity_type=_CAPACITY_TYPES.get(group.capacity.kind, "ON_DEMAND"),
            subnets=[context.network.subnets[group.zone].subnet_id],
            labels={"nxpipe/group": group.name},
            taints=[_Group.TaintProperty(key=NEURON, value="true", effect="NO_SCHEDULE")],
            scaling_config=_Group.ScalingConfigProperty(
                min_size=group.size.min, desired_size=_desired(group), max_size=group.size.max
            ),
            **_common(context, template),
        )
        warn_of_ended_block(Stack.of(self), group.capacity)
        if isinstance(group.capacity, CapacityBlock):
            self._schedule(context, group, group.capacity)

    def _schedule(self, context: ClusterContext, group: NodeGroup, block: CapacityBlock) -> None:
        """Scale to the maximum at the block's start, because all of it is paid for, and to zero before its end."""
        name = cluster_name(context.project)
        maximum = group.size.max

        def scaled_to(count: int) -> dict[str, object]:
            size = {"MinSize": 0, "DesiredSize": count, "MaxSize": maximum}
            return {"ClusterName": name, "NodegroupName": group.name, "ScalingConfig": size}

        call, permissions = "eks:updateNodegroupConfig", {"eks:UpdateNodegroupConfig": self.node_group.attr_arn}
        calls = (
            ScheduledCall("opens", block.start.astimezone(UTC), call, scaled_to(maximum), permissions),
            ScheduledCall("drains", block.drained, call, scaled_to(0), permissions),
        )
        add_schedules(self, f"{context.project}-nodes-{group.name}", block, calls)


def _desired(group: NodeGroup) -> int:
    """The desired size; the maximum in an open capacity block, as its schedule sets it."""
    block = group.capacity
    return group.size.max if isinstance(block, CapacityBlock) and block.is_open(current_time()) else group.size.desired


def _common(context: ClusterContext, template: Template) -> dict[str, object]:
    return {
        "cluster_name": context.cluster.ref,
        "version": context.lock.kubernetes,
        "node_role": context.role.role_arn,
        "launch_template": _Group.LaunchTemplateSpecificationProperty(
            id=template.ref, version=template.attr_latest_version_number
        ),
        "update_config": _Group.UpdateConfigProperty(max_unavailable=1),
        "node_repair_config": _Group.NodeRepairConfigProperty(enabled=True),
    }


def _template(
    scope: Construct,
    context: ClusterContext,
    name: str,
    instance_type: str,
    groups: list[aws_ec2.ISecurityGroup],
    *,
    near: aws_ec2.CfnPlacementGroup | None = None,
    capacity: Capacity | None = None,
    efa: bool = False,
    root_gib: int = _ROOT_GIB,
    user_data: str = "",
) -> Template:
    machine = Machine(
        name=f"{context.project}-nodes-{name}",
        image=None,
        profile=None,
        groups=groups,
        user_data=user_data,  # EKS adds the commands by which a node joins
        root_device="/dev/xvda",  # of Amazon Linux
        root_gib=root_gib,
        kubernetes=True,
        near=near,
        tags={PROJECT_TAG: context.project},
    )
    return launch_template(scope, "Template", machine, instance_type=instance_type, capacity=capacity, efa=efa)


_LOGS: Final = ("api", "audit", "authenticator", "controllerManager", "scheduler")
_NODE_POLICIES: Final = ("AmazonEC2ContainerRegistryPullOnly", "AmazonEKSWorkerNodePolicy")
_KEY_ACTIONS: Final = ("kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:ListGrants")
_DESCRIBED: Final = (
    "AvailabilityZones",
    "DhcpOptions",
    "InstanceTopology",
    "Instances",
    "NetworkInterfaces",
    "Vpcs",
)

_Cluster = aws_eks.CfnCluster


class ClusterStack(Stack):
    """Control plane, add-ons, node groups and access entries of the cluster."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        cluster: Cluster,
        lock: ClusterLock,
        network: NetworkHandle,
        store: StoreHandle,
        prefix: str,
        cache: CacheHandle,
        **kwargs: Any,
    ) -> None:
        """`prefix` is the store's key prefix in the bucket, such as "models/"."""
        super().__init__(scope, id_, description=f"Cluster of {project}", **kwargs)
        self._project, self._network, self._store = project, network, store
        self._cluster = self._control_plane(cluster, lock)
        for index, role in enumerate(cluster.admins):
            self._add_admin(f"Admin{index}", role)
        addons = Addons(self, "Addons", project=project, cluster=self._cluster, lock=lock, cache=cache)
        system = self._nodes(cluster, lock, addons)
        for addon in addons.after_nodes:
            addon.node.add_dependency(system)
        self._grant_artifacts_to_pods(prefix)
        tag_project(self, project)
        CfnOutput(self, "ClusterName", value=self._cluster.ref, description="For `aws eks update-kubeconfig --name`")

    def _control_plane(self, cluster: Cluster, lock: ClusterLock) -> aws_eks.CfnCluster:
        role = self._control_role()
        plane = _Cluster(
            self,
            "Cluster",
            name=cluster_name(self._project),
            version=lock.kubernetes,
            role_arn=role.role_arn,
            access_config=_Cluster.AccessConfigProperty(
                authentication_mode="API", bootstrap_cluster_creator_admin_permissions=False
            ),
            bootstrap_self_managed_addons=False,  # the add-ons of this stack have locked versions
            encryption_config=[
                _Cluster.EncryptionConfigProperty(
                    provider=_Cluster.ProviderProperty(key_arn=self._store.key.key_arn), resources=["secrets"]
                )
            ],
            logging=_Cluster.LoggingProperty(
                cluster_logging=_Cluster.ClusterLoggingProperty(
                    enabled_types=[_Cluster.LoggingTypeConfigProperty(type=log) for log in _LOGS]
                )
            ),
            resources_vpc_config=_Cluster.ResourcesVpcConfigProperty(
                subnet_ids=[subnet.subnet_id for subnet in self._network.subnets.values()],
                security_group_ids=[self._callers().security_group_id],
                endpoint_private_access=True,
                endpoint_public_access=cluster.public is not None,
                public_access_cidrs=list(cluster.public) if cluster.public else None,
            ),
            # EKS upgrades the cluster when standard support ends, in place of billing extended support.
            upgrade_policy=_Cluster.UpgradePolicyProperty(support_type="STANDARD"),
        )
        wait_for_permissions(plane, role)
        plane.node.add_dependency(self._logs())
        return plane

    def _logs(self) -> aws_logs.LogGroup:
        """Log group under the name that EKS uses; one that EKS creates itself is never deleted."""
        return log_group(self, "Logs", f"/aws/eks/{cluster_name(self._project)}/cluster")

    def _control_role(self) -> aws_iam.Role:
        """Role of the control plane, with the least that EKS requires.

        AmazonEKSClusterPolicy also permits to change routes, volumes, security groups and load balancers of the whole
        account, for the legacy cloud provider, which no object of this cluster uses.
        """
        role = aws_iam.Role(
            self,
            "ControlRole",
            path="/nxpipe/",
            description=f"The control plane of {self._project}",
            assumed_by=own_account_service(self, "eks"),
        )
        instances = f"arn:{self.partition}:ec2:{self.region}:{self.account}:instance/*"
        tag = {
            "ForAnyValue:StringLike": {"aws:TagKeys": f"kubernetes.io/cluster/{cluster_name(self._project)}"},
            "StringEquals": {f"aws:ResourceTag/{PROJECT_TAG}": self._project},
        }
        for statement in (
            aws_iam.PolicyStatement(actions=list(_KEY_ACTIONS), resources=[self._store.key.key_arn]),
            aws_iam.PolicyStatement(actions=["ec2:CreateTags"], resources=[instances], conditions=tag),
            aws_iam.PolicyStatement(actions=[f"ec2:Describe{kind}" for kind in _DESCRIBED], resources=["*"]),
        ):
            role.add_to_principal_policy(statement)
        return role

    def _callers(self) -> aws_ec2.SecurityGroup:
        """Security group for API clients in the network other than nodes. Requests still need authentication."""
        group = aws_ec2.SecurityGroup(
            self,
            "Callers",
            vpc=self._network.vpc,
            description=f"Callers of the API of {self._project}",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(aws_ec2.Peer.ipv4(self._network.cidr), aws_ec2.Port.tcp(443), "from the network")
        return group

    def _add_admin(self, id_: str, role: str) -> None:
        policy = f"arn:{self.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
        aws_eks.CfnAccessEntry(
            self,
            id_,
            cluster_name=self._cluster.ref,
            principal_arn=role,
            type="STANDARD",
            access_policies=[
                aws_eks.CfnAccessEntry.AccessPolicyProperty(
                    policy_arn=policy,
                    access_scope=aws_eks.CfnAccessEntry.AccessScopeProperty(type="cluster"),
                )
            ],
        )

    def _nodes(self, cluster: Cluster, lock: ClusterLock, addons: Addons) -> aws_eks.CfnNodegroup:
        """Create all node groups; returns the system group, which add-ons run on."""
        cluster_group = self._cluster.attr_cluster_security_group_id
        context = ClusterContext(
            project=self._project,
            cluster=self._cluster,
            group=aws_ec2.SecurityGroup.from_security_group_id(self, "Members", cluster_group),
            role=self._node_role(),
            lock=lock,
            network=self._network,
        )
        system = SystemNodes(self, "System", context=context, instance_type=cluster.system_type).node_group
        groups = [
            NeuronNodes(self, f"Nodes-{group.name}", context=context, group=group).node_group
            for group in cluster.groups
        ]
        for group in (system, *groups):
            for addon in addons.before_nodes:
                group.node.add_dependency(addon)
        return system

    def _node_role(self) -> aws_iam.Role:
        """Role of all nodes. Its instance profile has a fixed name, for nodes outside of node groups."""
        role = aws_iam.Role(
            self,
            "NodeRole",
            path="/nxpipe/",
            description=f"Nodes of {self._project}",
            assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[aws_iam.ManagedPolicy.from_aws_managed_policy_name(name) for name in _NODE_POLICIES],
        )
        name = node_profile(self._project)
        aws_iam.CfnInstanceProfile(
            self, "NodeProfile", instance_profile_name=name, path="/nxpipe/", roles=[role.role_name]
        )
        return role

    def _grant_artifacts_to_pods(self, prefix: str) -> None:
        role = pod_role(self, "Artifacts", self._project, "Reads artifacts in pods")
        read_artifacts(self._store, role, prefix)
        association = aws_eks.CfnPodIdentityAssociation(
            self,
            "ArtifactsOfPods",
            cluster_name=self._cluster.ref,
            namespace=NAMESPACE,
            service_account=SERVICE_ACCOUNT,
            role_arn=role.role_arn,
        )
        wait_for_permissions(association, role)
