"""EKS: the settings of a cluster beside its network, its own security group, and updates of node groups."""

import uuid
from typing import Any, Final

from moto.core.responses import ActionResult
from moto.eks import urls
from moto.eks.models import EKSBackend
from moto.eks.responses import EKSResponse

from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches._around import around
from tests.localaws.moto_patches._eks import KINDS, all_of, update

_OF_A_CLUSTER: Final[dict[str, Any]] = {
    "accessConfig": {"authenticationMode": "CONFIG_MAP"},
    "computeConfig": {"enabled": False},
    "storageConfig": {"blockStorage": {"enabled": False}},
    "upgradePolicy": {"supportType": "EXTENDED"},
}
_ATTRIBUTES: Final = {
    "accessConfig": "access_config",
    "computeConfig": "compute_config",
    "kubernetesNetworkConfig": "kubernetes_network_config",
    "resourcesVpcConfig": "resources_vpc_config",
    "storageConfig": "storage_config",
    "upgradePolicy": "upgrade_policy",
}


def apply() -> None:
    urls.url_paths["{0}/clusters/(?P<rest>.+)$"] = urls.response.dispatch
    around(EKSResponse, "create_cluster", _create_cluster)
    around(EKSResponse, "create_nodegroup", _create_nodegroup)
    around(EKSBackend, "delete_cluster", _delete_cluster)
    around(EKSBackend, "tag_resource", _tag)
    around(EKSBackend, "untag_resource", _untag)
    for call in (update_cluster_config, update_cluster_version, update_nodegroup_version):
        setattr(EKSResponse, call.__name__, call)


# Clusters and node groups


def _create_cluster(stock: Any, self: Any) -> ActionResult:
    result: ActionResult = stock(self)
    cluster = self.eks_backend.clusters[self._get_param("name")]
    for name, usual in _OF_A_CLUSTER.items():
        setattr(cluster, _ATTRIBUTES[name], {**usual, **(self._get_param(name) or {})})
    ec2 = client_of("ec2", self.region)
    network = dict(cluster.resources_vpc_config)
    vpc = ec2.describe_subnets(SubnetIds=network["subnetIds"])["Subnets"][0]["VpcId"]
    group = ec2.create_security_group(
        GroupName=f"eks-cluster-sg-{cluster.name}-{uuid.uuid4().hex[:8]}",
        Description="EKS created security group applied to ENI that is attached to EKS Control Plane",
        VpcId=vpc,
    )
    usual = {"endpointPublicAccess": True, "endpointPrivateAccess": False, "securityGroupIds": []}
    own = {"clusterSecurityGroupId": group["GroupId"], "vpcId": vpc}
    cluster.resources_vpc_config = {**usual, **network, **own}
    return result


def _delete_cluster(stock: Any, backend: EKSBackend, name: str) -> Any:
    result = stock(backend, name)
    group = result.resources_vpc_config["clusterSecurityGroupId"]
    client_of("ec2", backend.region_name).delete_security_group(GroupId=group)
    for kind in KINDS:
        records = all_of(backend, kind)
        for key in [key for key in records if key[0] == name]:
            del records[key]
    return result


def update_cluster_config(self: Any) -> ActionResult:
    cluster = self.eks_backend.describe_cluster(self._get_param("name"))
    for name, attribute in _ATTRIBUTES.items():
        if (value := self._get_param(name)) is not None:
            setattr(cluster, attribute, {**getattr(cluster, attribute), **value})
    if (value := self._get_param("logging")) is not None:
        cluster.logging = value
    return update("ConfigUpdate")


def update_cluster_version(self: Any) -> ActionResult:
    self.eks_backend.describe_cluster(self._get_param("name")).version = self._get_param("version")
    return update("VersionUpdate")


def _create_nodegroup(stock: Any, self: Any) -> ActionResult:
    result: ActionResult = stock(self)
    group = _nodegroup(self)
    group.update_config = self._get_param("updateConfig") or {"maxUnavailable": 1}
    group.node_repair_config = self._get_param("nodeRepairConfig")
    return result


def _nodegroup(self: Any) -> Any:
    cluster = self._get_param("clusterName") or self._get_param("name")
    return self.eks_backend.describe_nodegroup(cluster, self._get_param("nodegroupName"))


def update_nodegroup_version(self: Any) -> ActionResult:
    group = _nodegroup(self)
    for name, attribute in (("version", "version"), ("releaseVersion", "release_version")):
        if (value := self._get_param(name)) is not None:
            setattr(group, attribute, value)
    if (value := self._get_param("launchTemplate")) is not None:
        group.launch_template = {**(group.launch_template or {}), **value}
    return update("VersionUpdate")


# Tags by ARN


def _tagged(backend: EKSBackend, arn: str) -> dict[str, str] | None:
    for cluster in backend.clusters.values():
        for group in cluster.nodegroups.values():
            if group.arn == arn:
                tags: dict[str, str] = group.tags
                return tags
    for kind in KINDS:
        for record in all_of(backend, kind).values():
            if arn in record.values():
                current: dict[str, str] = record["tags"]
                return current
    return None


def _tag(stock: Any, backend: EKSBackend, arn: str, tags: dict[str, str]) -> None:
    current = _tagged(backend, arn)
    if current is None:
        stock(backend, arn, tags)
    else:
        current.update(tags)


def _untag(stock: Any, backend: EKSBackend, arn: str, keys: Any) -> None:
    names = [keys] if isinstance(keys, str) else keys
    current = _tagged(backend, arn)
    if current is None:
        stock(backend, arn, names)
        return
    for name in names:
        current.pop(name, None)
