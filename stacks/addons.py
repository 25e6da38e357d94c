"""The add-ons of a cluster, of the versions in its lock file, each with no more than it calls."""

from typing import Final

from aws_cdk import aws_eks, aws_iam
from constructs import Construct

from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.stacks.grants import mount_cache, wait_for_permissions
from nxpipe.stacks.handles import CacheHandle
from nxpipe.stacks.pods import pod_role

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
