"""EKS cluster: control plane, managed node groups with accelerators, and add-ons of the locked versions."""

from dataclasses import dataclass
from datetime import UTC
from typing import Any, Final

from aws_cdk import CfnOutput, Stack, aws_ec2, aws_eks, aws_iam, aws_logs
from constructs import Construct

from nxpipe.pipeline.config.cluster import SYSTEM, Cluster, NodeGroup
from nxpipe.pipeline.config.fleets import Capacity, CapacityBlock
from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.stacks.capacity_block import ScheduledCall, add_schedules, drained_at
from nxpipe.stacks.handles import CacheHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.iam import mount_cache, own_account_service, pod_role, read_artifacts, wait_for_permissions
from nxpipe.stacks.launch import Machine, Template, launch_template
from nxpipe.stacks.names import NAMESPACE, NEURON, SERVICE_ACCOUNT, cluster_name, node_profile
from nxpipe.stacks.project import PROJECT_TAG, log_group, tag_project

# Nodes are not ready without these, and the others do not run without nodes.
_BEFORE_NODES: Final = ("eks-pod-identity-agent", "kube-proxy", "vpc-cni")
_AFTER_NODES: Final = ("aws-efs-csi-driver", "coredns")

_LOOKS: Final = ("DescribeAccessPoints", "DescribeFileSystems", "DescribeMountTargets")


class Addons(Construct):
    """`cache` is what the EFS driver may mount."""

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
        made = {
            name: self._addon(name, lock.addons[name], cluster, accounts.get(name, {}))
            for name in (*_BEFORE_NODES, *_AFTER_NODES)
        }
        self.before_nodes = [made[name] for name in _BEFORE_NODES]
        self.after_nodes = [made[name] for name in _AFTER_NODES]

    def _addon(
        self, name: str, version: str, cluster: aws_eks.CfnCluster, accounts: dict[str, aws_iam.Role]
    ) -> aws_eks.CfnAddon:
        identities = [
            aws_eks.CfnAddon.PodIdentityAssociationProperty(service_account=account, role_arn=role.role_arn)
            for account, role in accounts.items()
        ]
        made = aws_eks.CfnAddon(
            self,
            name,
            addon_name=name,
            addon_version=version,
            cluster_name=cluster.ref,
            pod_identity_associations=identities or None,
            resolve_conflicts="OVERWRITE",  # what somebody changed by hand is not what the file says
        )
        for role in accounts.values():
            wait_for_permissions(made, role)
        return made

    def _files(self, project: str, cache: CacheHandle) -> aws_iam.Role:
        role = pod_role(self, "Files", project, "Mounts the compile cache in pods")
        for version in cache.access_points:
            mount_cache(cache, version, role)
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(
                actions=[f"elasticfilesystem:{look}" for look in _LOOKS],
                resources=[cache.file_system.file_system_arn],
            )
        )
        return role


_SYSTEM_NODES: Final = 2  # in two zones, so that names resolve when one is lost
_SYSTEM_ROOT_GIB: Final = 50
_ROOT_GIB: Final = 500  # Neuron images have tens of gigabytes, and several stay on a node
_KINDS: Final = {"capacity-block": "CAPACITY_BLOCK", "spot": "SPOT"}  # all others are on demand

_Group = aws_eks.CfnNodegroup


@dataclass(frozen=True)
class ClusterContext:
    """What all groups of a cluster share."""

    project: str
    cluster: aws_eks.CfnCluster
    group: aws_ec2.ISecurityGroup  # which EKS has made, and in which it expects every node
    role: aws_iam.Role
    lock: ClusterLock
    network: NetworkHandle


class SystemNodes(Construct):
    """Nodes without accelerators, for what the cluster itself needs: others would stand idle under it."""

    def __init__(self, scope: Construct, id_: str, *, home: ClusterContext, instance_type: str) -> None:
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

    def __init__(self, scope: Construct, id_: str, *, home: ClusterContext, group: NodeGroup) -> None:
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

    def _keep_to_its_time(self, home: ClusterContext, group: NodeGroup, block: CapacityBlock) -> None:
        """What was bought is bought as a whole, so all of it runs from the first minute on."""
        name = cluster_name(home.project)
        most = group.size.max

        def sized(count: int) -> dict[str, object]:
            size = {"MinSize": 0, "DesiredSize": count, "MaxSize": most}
            return {"ClusterName": name, "NodegroupName": group.name, "ScalingConfig": size}

        call, may = "eks:updateNodegroupConfig", {"eks:UpdateNodegroupConfig": self.made.attr_arn}
        turns = (
            ScheduledCall("opens", block.start.astimezone(UTC), call, sized(most), may),
            ScheduledCall("drains", drained_at(block), call, sized(0), may),
        )
        add_schedules(self, f"{home.project}-nodes-{group.name}", block, turns)


def _common(home: ClusterContext, template: Template) -> dict[str, object]:
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
    home: ClusterContext,
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


_LOGS: Final = ("api", "audit", "authenticator", "controllerManager", "scheduler")
_ON_NODES: Final = ("AmazonEC2ContainerRegistryPullOnly", "AmazonEKSWorkerNodePolicy")
_WITH_THE_KEY: Final = ("kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:ListGrants")

_Cluster = aws_eks.CfnCluster


class ClusterStack(Stack):
    """The control plane, the add-ons, the nodes, and who may do what."""

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
        """`prefix` is where the store is in its bucket: "" or "models/", say."""
        super().__init__(scope, id_, description=f"Cluster of {project}", **kwargs)
        self._project, self._network, self._store = project, network, store
        self._cluster = self._control_plane(cluster, lock)
        for index, role in enumerate(cluster.admins):
            self._let_rule(f"Admin{index}", role)
        addons = Addons(self, "Addons", project=project, cluster=self._cluster, lock=lock, cache=cache)
        system = self._nodes(cluster, lock, addons)
        for late in addons.after_nodes:
            late.node.add_dependency(system)
        self._let_pods_read_artifacts(prefix)
        tag_project(self, project)
        CfnOutput(self, "ClusterName", value=self._cluster.ref, description="For `aws eks update-kubeconfig --name`")

    def _control_plane(self, cluster: Cluster, lock: ClusterLock) -> aws_eks.CfnCluster:
        role = self._control_role()
        made = _Cluster(
            self,
            "Cluster",
            name=cluster_name(self._project),
            version=lock.kubernetes,
            role_arn=role.role_arn,
            access_config=_Cluster.AccessConfigProperty(
                authentication_mode="API", bootstrap_cluster_creator_admin_permissions=False
            ),
            bootstrap_self_managed_addons=False,  # ours have pinned versions
            encryption_config=[
                _Cluster.EncryptionConfigProperty(
                    provider=_Cluster.ProviderProperty(key_arn=self._store.key.key_arn), resources=["secrets"]
                )
            ],
            logging=_Cluster.LoggingProperty(
                cluster_logging=_Cluster.ClusterLoggingProperty(
                    enabled_types=[_Cluster.LoggingTypeConfigProperty(type=each) for each in _LOGS]
                )
            ),
            resources_vpc_config=_Cluster.ResourcesVpcConfigProperty(
                subnet_ids=[each.subnet_id for each in self._network.subnets.values()],
                security_group_ids=[self._callers().security_group_id],
                endpoint_private_access=True,
                endpoint_public_access=cluster.public is not None,
                public_access_cidrs=list(cluster.public) if cluster.public else None,
            ),
            # EKS moves a cluster on when the standard support of its version ends, and never bills the extended one.
            upgrade_policy=_Cluster.UpgradePolicyProperty(support_type="STANDARD"),
        )
        wait_for_permissions(made, role)
        made.node.add_dependency(self._logs())
        return made

    def _logs(self) -> aws_logs.LogGroup:
        """EKS would make it itself, and leave it behind for ever."""
        return log_group(self, "Logs", f"/aws/eks/{cluster_name(self._project)}/cluster")

    def _control_role(self) -> aws_iam.Role:
        role = aws_iam.Role(
            self,
            "ControlRole",
            path="/nxpipe/",
            description=f"The control plane of {self._project}",
            assumed_by=own_account_service(self, "eks"),
            managed_policies=[aws_iam.ManagedPolicy.from_aws_managed_policy_name("AmazonEKSClusterPolicy")],
        )
        role.add_to_principal_policy(
            aws_iam.PolicyStatement(actions=list(_WITH_THE_KEY), resources=[self._store.key.key_arn])
        )
        return role

    def _callers(self) -> aws_ec2.SecurityGroup:
        """EKS lets nodes call the API; this lets everything else in the network, which has to say who it is."""
        group = aws_ec2.SecurityGroup(
            self,
            "Callers",
            vpc=self._network.vpc,
            description=f"Callers of the API of {self._project}",
            allow_all_outbound=False,
        )
        group.add_ingress_rule(aws_ec2.Peer.ipv4(self._network.cidr), aws_ec2.Port.tcp(443), "from the network")
        return group

    def _let_rule(self, id_: str, role: str) -> None:
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
        """The group that add-ons run on, the others being there as well."""
        made_by_eks = self._cluster.attr_cluster_security_group_id
        home = ClusterContext(
            project=self._project,
            cluster=self._cluster,
            group=aws_ec2.SecurityGroup.from_security_group_id(self, "Members", made_by_eks),
            role=self._node_role(),
            lock=lock,
            network=self._network,
        )
        system = SystemNodes(self, "System", home=home, instance_type=cluster.system_type).made
        groups = [NeuronNodes(self, f"Nodes-{each.name}", home=home, group=each).made for each in cluster.groups]
        for group in (system, *groups):
            for early in addons.before_nodes:
                group.node.add_dependency(early)
        return system

    def _node_role(self) -> aws_iam.Role:
        """With a profile of a known name, for nodes that are not started by a node group."""
        role = aws_iam.Role(
            self,
            "NodeRole",
            path="/nxpipe/",
            description=f"Nodes of {self._project}",
            assumed_by=aws_iam.ServicePrincipal("ec2.amazonaws.com"),
            managed_policies=[aws_iam.ManagedPolicy.from_aws_managed_policy_name(each) for each in _ON_NODES],
        )
        name = node_profile(self._project)
        aws_iam.CfnInstanceProfile(
            self, "NodeProfile", instance_profile_name=name, path="/nxpipe/", roles=[role.role_name]
        )
        return role

    def _let_pods_read_artifacts(self, prefix: str) -> None:
        role = pod_role(self, "Artifacts", self._project, "Reads artifacts in pods")
        read_artifacts(self._store, role, prefix)
        aws_eks.CfnPodIdentityAssociation(
            self,
            "ArtifactsOfPods",
            cluster_name=self._cluster.ref,
            namespace=NAMESPACE,
            service_account=SERVICE_ACCOUNT,
            role_arn=role.role_arn,
        )
