"""What Karpenter starts nodes from: a class and a pool for each instance type of the cluster's groups.

One for each type, because the interfaces of an instance are those of its network cards, and Karpenter would drop every
type that they do not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.cloud import ExistingNetwork
from nxpipe.pipeline.config.cluster import NodeGroup
from nxpipe.pipeline.fleet.kubernetes.document import Object, Value
from nxpipe.stacks.names import NEURON, PROJECT_TAG, cluster_name, efa_group, node_profile

_ROOT: Final = "500Gi"  # as in the node groups
_RESERVED: Final = ("reservation", "capacity-block")


@dataclass(frozen=True)
class Pool:
    """All groups of one instance type."""

    instance_type: str
    groups: tuple[NodeGroup, ...]

    @property
    def name(self) -> str:
        return self.instance_type.replace(".", "-")

    @property
    def zones(self) -> list[str]:
        return sorted({each.zone for each in self.groups})

    @property
    def markets(self) -> list[str]:
        kinds = {each.capacity.kind for each in self.groups}
        return sorted({"reserved" if kind in _RESERVED else kind for kind in kinds})

    @property
    def reservations(self) -> list[str]:
        found = {each.capacity.id for each in self.groups if each.capacity.kind in ("reservation", "capacity-block")}
        return sorted(found)

    @property
    def most(self) -> int:
        return sum(each.size.max for each in self.groups)


def pools(groups: Sequence[NodeGroup]) -> list[Pool]:
    types = sorted({each.instance_type for each in groups})
    return [Pool(type_, tuple(each for each in groups if each.instance_type == type_)) for type_ in types]


def objects(config: Config, pool: Pool, image: str) -> list[Object]:
    return [_class(config, pool, image), _pool(pool)]


def _class(config: Config, pool: Pool, image: str) -> Object:
    project = config.project.name
    tags: dict[str, Value] = {"Name": f"{project}-karpenter-{pool.name}", PROJECT_TAG: project}
    spec: dict[str, Value] = {
        "amiFamily": "AL2023",
        "amiSelectorTerms": [{"id": image}],
        "instanceProfile": node_profile(project),  # a closed network does not reach IAM, so that none is made
        "subnetSelectorTerms": _subnets(config),
        "securityGroupSelectorTerms": _security_groups(project, pool),
        "metadataOptions": {"httpEndpoint": "enabled", "httpTokens": "required", "httpPutResponseHopLimit": 2},
        "blockDeviceMappings": [
            {
                "deviceName": "/dev/xvda",
                "ebs": {"volumeType": "gp3", "volumeSize": _ROOT, "encrypted": True, "deleteOnTermination": True},
            }
        ],
        "detailedMonitoring": True,
        "tags": tags,
    }
    if pool.reservations:
        spec["capacityReservationSelectorTerms"] = [{"id": each} for each in pool.reservations]
    if cards := INSTANCES[pool.instance_type].efa_interfaces:
        spec["networkInterfaces"] = interfaces(cards)
    return {"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": pool.name}, "spec": spec}


def interfaces(cards: int) -> list[Object]:
    """An address for the node, and an adapter on each card; that of the first stands beside the address."""
    first: Object = {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    adapters: list[Object] = [
        {"networkCardIndex": card, "deviceIndex": 0 if card else 1, "interfaceType": "efa-only"}
        for card in range(cards)
    ]
    return [first, *adapters]


def _subnets(config: Config) -> list[Object]:
    """Those of an own network are found by their tags: their ids are known when they are deployed."""
    if isinstance(config.network, ExistingNetwork):
        return [{"id": each.id} for each in config.network.subnets]
    return [{"tags": {PROJECT_TAG: config.project.name, "aws-cdk:subnet-name": "fleet"}}]


def _security_groups(project: str, pool: Pool) -> list[Object]:
    """Terms of one list are alternatives: every group that fits one of them is taken."""
    own: Object = {"tags": {"aws:eks:cluster-name": cluster_name(project)}}
    efa: Object = {"tags": {"Name": efa_group(project), PROJECT_TAG: project}}
    return [own, efa] if INSTANCES[pool.instance_type].efa_interfaces else [own]


def _pool(pool: Pool) -> Object:
    wanted = {
        "node.kubernetes.io/instance-type": [pool.instance_type],
        "topology.kubernetes.io/zone": pool.zones,
        "karpenter.sh/capacity-type": pool.markets,
    }
    spec: Object = {
        "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": pool.name},
        "requirements": [{"key": key, "operator": "In", "values": values} for key, values in wanted.items()],
        "taints": [{"key": NEURON, "value": "true", "effect": "NoSchedule"}],
    }
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": pool.name},
        "spec": {
            "template": {"spec": spec},
            "limits": {"cpu": str(INSTANCES[pool.instance_type].vcpus * pool.most)},
            # A pod that trains or serves is not moved for the sake of order.
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "10m"},
        },
    }
