"""Kubernetes, for whom it suits: EKS with nodes that have accelerators, and nothing that applies objects for it.

What runs in it are files (`nxpipe infra manifests`), which people apply or have applied. So there is no function in the
account that may do everything in the cluster.
"""

from typing import Any, Final

from aws_cdk import CfnOutput, Stack, aws_ec2, aws_eks, aws_iam, aws_logs
from constructs import Construct

from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.stacks.addons import Addons
from nxpipe.stacks.grants import read_artifacts, wait_for_permissions
from nxpipe.stacks.handles import CacheHandle, NetworkHandle, StoreHandle
from nxpipe.stacks.kept_log import kept_log
from nxpipe.stacks.names import NAMESPACE, SERVICE_ACCOUNT, cluster_name, node_profile
from nxpipe.stacks.nodes import Home, NeuronNodes, SystemNodes
from nxpipe.stacks.pods import pod_role
from nxpipe.stacks.project_tag import tag_project
from nxpipe.stacks.trust import for_us

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
        return kept_log(self, "Logs", f"/aws/eks/{cluster_name(self._project)}/cluster")

    def _control_role(self) -> aws_iam.Role:
        role = aws_iam.Role(
            self,
            "ControlRole",
            path="/nxpipe/",
            description=f"The control plane of {self._project}",
            assumed_by=for_us(self, "eks"),
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
        home = Home(
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
