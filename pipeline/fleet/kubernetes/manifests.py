"""Manifests of a project's cluster: Neuron components, Karpenter node pools, namespace.

The same configuration and lock file give the same bytes. EKS's own scheduler accepts no extension, so a second
scheduler runs beside it, selected by a pod's `schedulerName`; its extension gives a pod connected accelerators. There
is one node class and pool per instance type: the network interfaces of a class must fit the network cards of the
instance, and Karpenter drops every type that they do not fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.cloud import ExistingNetwork
from nxpipe.pipeline.config.cluster import Cluster, Mirror, NodeGroup
from nxpipe.pipeline.config.locks import ClusterLock
from nxpipe.pipeline.fleet.kubernetes.objects import (
    SYSTEM,
    KubernetesObject,
    Rule,
    YamlValue,
    cluster_role,
    cluster_role_binding,
    daemon_set,
    deployment,
    device_plugin,
    namespaced_role,
    role_binding,
    service_account,
    to_yaml,
)
from nxpipe.pipeline.util.errors import WouldOverwrite
from nxpipe.pipeline.util.files import write_whole
from nxpipe.stacks.names import NAMESPACE, NEURON, PROJECT_TAG, SERVICE_ACCOUNT, cluster_name, efa_group, node_profile

PLUGIN: Final = "neuron-device-plugin"
EXTENSION: Final = "neuron-scheduler-extension"
SCHEDULER: Final = "neuron-scheduler"
MONITOR: Final = "neuron-monitor"

_PORT: Final = 12345
_METRICS_PORT: Final = 8000  # as in AWS's manifest of neuron-monitor
_CONFIG: Final = "/etc/neuron-scheduler"
_RESOURCES: Final = ("aws.amazon.com/neuron", "aws.amazon.com/neuroncore", "aws.amazon.com/neurondevice")
_PODS: Final[Rule] = ("", ["pods"], ["get", "list", "watch", "patch", "update"])
_NODES: Final[Rule] = ("", ["nodes"], ["get", "list", "watch"])
_EVENTS: Final[Rule] = ("", ["events"], ["create", "patch"])


def device_plugin_objects(image: str, types: Sequence[str]) -> list[KubernetesObject]:
    node: KubernetesObject = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    config: KubernetesObject = {"name": "KUBECONFIG", "value": "/etc/kubernetes/kubelet.conf"}
    rules: list[Rule] = [_NODES, _EVENTS, _PODS, ("", ["nodes/status"], ["patch", "update"])]
    return [
        service_account(PLUGIN),
        *cluster_role(PLUGIN, rules),
        device_plugin(PLUGIN, image, types, account=PLUGIN, env=[config, node], folders={"run": "/run"}),
    ]


def monitor_objects(image: str, types: Sequence[str]) -> list[KubernetesObject]:
    """neuron-monitor on each node with devices, which serves metrics of all devices in the format of Prometheus."""
    container: KubernetesObject = {
        "name": MONITOR,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/opt/bin/entrypoint.sh"],
        "args": ["--port", str(_METRICS_PORT)],
        "env": [{"name": "GOMEMLIMIT", "value": "160MiB"}],  # below the limit of memory
        "ports": [{"name": "metrics", "containerPort": _METRICS_PORT}],
        "resources": {
            "requests": {"cpu": "256m", "memory": "128Mi"},
            "limits": {"cpu": "500m", "memory": "256Mi"},
        },
        "securityContext": {"privileged": True},  # it reads all devices, which the device plugin gives to other pods
    }
    return [daemon_set(MONITOR, types, {"containers": [container]})]


def scheduler_extension_objects(image: str) -> list[KubernetesObject]:
    """The extender that selects nodes with enough connected devices, and assigns devices to a pod."""
    rules: list[Rule] = [
        _NODES,
        _EVENTS,
        _PODS,
        ("", ["nodes/status"], ["get", "list", "watch", "patch", "update"]),
        ("", ["bindings", "pods/binding"], ["create"]),
    ]
    container: KubernetesObject = {
        "image": image,
        "env": [{"name": "PORT", "value": str(_PORT)}],
        "ports": [{"name": "http", "containerPort": _PORT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }
    service: KubernetesObject = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": EXTENSION, "namespace": SYSTEM},
        "spec": {
            "selector": {"name": EXTENSION},
            "ports": [{"name": "http", "port": _PORT, "targetPort": _PORT}],
        },
    }
    return [service_account(EXTENSION), *cluster_role(EXTENSION, rules), deployment(EXTENSION, container), service]


def scheduler_objects(image: str) -> list[KubernetesObject]:
    config: KubernetesObject = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SCHEDULER, "namespace": SYSTEM},
        "data": {"config.yaml": to_yaml([_configuration()]).removeprefix("---\n")},
    }
    probe: KubernetesObject = {
        "httpGet": {"path": "/healthz", "port": 10259, "scheme": "HTTPS"},
        "initialDelaySeconds": 15,
    }
    container: KubernetesObject = {
        "image": image,
        "command": ["/usr/local/bin/kube-scheduler", f"--config={_CONFIG}/config.yaml"],
        "livenessProbe": probe,
        "readinessProbe": probe,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "volumeMounts": [{"name": "config", "mountPath": _CONFIG, "readOnly": True}],
    }
    return [
        service_account(SCHEDULER),
        cluster_role_binding(SCHEDULER, "system:kube-scheduler", SCHEDULER),
        cluster_role_binding(f"{SCHEDULER}-volumes", "system:volume-scheduler", SCHEDULER),
        *_leases(),
        role_binding(f"{SCHEDULER}-callers", "extension-apiserver-authentication-reader", SCHEDULER),
        config,
        deployment(SCHEDULER, container, volumes=[{"name": "config", "configMap": {"name": SCHEDULER}}]),
    ]


def _leases() -> list[KubernetesObject]:
    """Permission for a lease of its own: the role system:kube-scheduler covers only that of the default scheduler."""
    group, kind = "coordination.k8s.io", "leases"
    make: KubernetesObject = {"apiGroups": [group], "resources": [kind], "verbs": ["create"]}
    hold: KubernetesObject = {
        "apiGroups": [group],
        "resources": [kind],
        "resourceNames": [SCHEDULER],
        "verbs": ["get", "list", "update", "watch"],
    }
    return [namespaced_role(SCHEDULER, [make, hold]), role_binding(SCHEDULER, SCHEDULER, SCHEDULER)]


def _configuration() -> KubernetesObject:
    extender: KubernetesObject = {
        "urlPrefix": f"http://{EXTENSION}.{SYSTEM}.svc.cluster.local:{_PORT}",
        "filterVerb": "filter",
        "bindVerb": "bind",
        "enableHTTPS": False,
        "nodeCacheCapable": True,
        "managedResources": [{"name": resource, "ignoredByScheduler": False} for resource in _RESOURCES],
        "ignorable": False,
    }
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": True, "resourceNamespace": SYSTEM, "resourceName": SCHEDULER},
        "profiles": [{"schedulerName": SCHEDULER}],
        "extenders": [extender],
    }


_ROOT: Final = "500Gi"  # root volume, as in the node groups
_RESERVED: Final = ("reservation", "capacity-block")


@dataclass(frozen=True)
class NodePool:
    """Node groups of one instance type."""

    instance_type: str
    groups: tuple[NodeGroup, ...]

    @property
    def name(self) -> str:
        return self.instance_type.replace(".", "-")

    @property
    def zones(self) -> list[str]:
        return sorted({group.zone for group in self.groups})

    @property
    def markets(self) -> list[str]:
        kinds = {group.capacity.kind for group in self.groups}
        return sorted({"reserved" if kind in _RESERVED else kind for kind in kinds})

    @property
    def reservations(self) -> list[str]:
        ids = {group.capacity.id for group in self.groups if group.capacity.kind in ("reservation", "capacity-block")}
        return sorted(ids)

    @property
    def most(self) -> int:
        return sum(group.size.max for group in self.groups)


def node_pools(groups: Sequence[NodeGroup]) -> list[NodePool]:
    types = sorted({group.instance_type for group in groups})
    return [NodePool(type_, tuple(group for group in groups if group.instance_type == type_)) for type_ in types]


def node_pool_objects(config: Config, pool: NodePool, image: str) -> list[KubernetesObject]:
    return [_class(config, pool, image), _pool(pool)]


def _class(config: Config, pool: NodePool, image: str) -> KubernetesObject:
    project = config.project.name
    tags: dict[str, YamlValue] = {"Name": f"{project}-karpenter-{pool.name}", PROJECT_TAG: project}
    spec: dict[str, YamlValue] = {
        "amiFamily": "AL2023",
        "amiSelectorTerms": [{"id": image}],
        "instanceProfile": node_profile(project),  # named, because Karpenter cannot create one in a closed network
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
    if user_data := pool.groups[0].user_data:
        spec["userData"] = user_data
    if pool.reservations:
        spec["capacityReservationSelectorTerms"] = [{"id": reservation} for reservation in pool.reservations]
    if cards := INSTANCES[pool.instance_type].efa_interfaces:
        spec["networkInterfaces"] = network_interfaces(cards)
    return {"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": pool.name}, "spec": spec}


def network_interfaces(cards: int) -> list[KubernetesObject]:
    """The node's interface, and an EFA adapter per network card; on the first card it is the second device."""
    first: KubernetesObject = {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    adapters: list[KubernetesObject] = [
        {"networkCardIndex": card, "deviceIndex": 0 if card else 1, "interfaceType": "efa-only"}
        for card in range(cards)
    ]
    return [first, *adapters]


def _subnets(config: Config) -> list[KubernetesObject]:
    """Subnets by id, or by tags in a network of our own, whose ids are known after deployment."""
    if isinstance(config.network, ExistingNetwork):
        return [{"id": subnet.id} for subnet in config.network.subnets]
    return [{"tags": {PROJECT_TAG: config.project.name, "aws-cdk:subnet-name": "fleet"}}]


def _security_groups(project: str, pool: NodePool) -> list[KubernetesObject]:
    """Terms are alternatives: every group that matches one of them is attached."""
    own: KubernetesObject = {"tags": {"aws:eks:cluster-name": cluster_name(project)}}
    efa: KubernetesObject = {"tags": {"Name": efa_group(project), PROJECT_TAG: project}}
    return [own, efa] if INSTANCES[pool.instance_type].efa_interfaces else [own]


def _pool(pool: NodePool) -> KubernetesObject:
    requirements = {
        "node.kubernetes.io/instance-type": [pool.instance_type],
        "topology.kubernetes.io/zone": pool.zones,
        "karpenter.sh/capacity-type": pool.markets,
    }
    spec: KubernetesObject = {
        "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": pool.name},
        "requirements": [{"key": key, "operator": "In", "values": values} for key, values in requirements.items()],
        "taints": [{"key": NEURON, "value": "true", "effect": "NoSchedule"}],
    }
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": pool.name},
        "spec": {
            "template": {"spec": spec},
            "limits": {"cpu": str(INSTANCES[pool.instance_type].vcpus * pool.most)},
            # Pods that train or serve are not evicted for consolidation.
            "disruption": {"consolidationPolicy": "WhenEmpty", "consolidateAfter": "10m"},
        },
    }


HEAD: Final = "# Written by `nxpipe infra manifests`: change nxpipe.toml or the lock file, not this.\n"
_EFA_PLUGIN: Final = "aws-efa-k8s-device-plugin"


def manifests(config: Config, cluster: Cluster, images: Mirror, lock: ClusterLock) -> dict[str, str]:
    """Manifests by file name."""
    objects_by_name = {
        "artifacts": _artifacts(),
        **_plugins(cluster, images, lock),
        "neuron-scheduler-extension": scheduler_extension_objects(_pinned(images.scheduler_extension, lock)),
        "neuron-scheduler": scheduler_objects(_pinned(images.scheduler, lock)),
    }
    for pool in node_pools(cluster.groups):
        objects_by_name[f"karpenter-{pool.name}"] = node_pool_objects(config, pool, lock.neuron.image)
    return {f"{name}.yaml": HEAD + to_yaml(objects) for name, objects in sorted(objects_by_name.items())}


def _artifacts() -> list[KubernetesObject]:
    """Namespace and service account of pods that run artifacts."""
    space: KubernetesObject = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    return [space, service_account(SERVICE_ACCOUNT, NAMESPACE)]


def _plugins(cluster: Cluster, images: Mirror, lock: ClusterLock) -> dict[str, list[KubernetesObject]]:
    types = sorted({group.instance_type for group in cluster.groups})
    plugins = {"neuron-device-plugin": device_plugin_objects(_pinned(images.device_plugin, lock), types)}
    if images.monitor:
        plugins["neuron-monitor"] = monitor_objects(_pinned(images.monitor, lock), types)
    efa_types = [type_ for type_ in types if INSTANCES[type_].efa_interfaces]
    if efa_types and images.efa_plugin:
        image = _pinned(images.efa_plugin, lock)
        folders = {"infiniband": "/dev/infiniband"}
        plugins["efa-device-plugin"] = [
            device_plugin(_EFA_PLUGIN, image, efa_types, host_network=True, folders=folders)
        ]
    return plugins


def _pinned(image: str, lock: ClusterLock) -> str:
    """The image by digest only: a tag beside it would not be checked."""
    return f"{image.rpartition(':')[0]}@{lock.images[image]}"


def write_manifests(folder: Path, files: Mapping[str, str], head: str) -> None:
    """Writes the files and deletes stale ones. `head` is the first line of a file that this command has written."""
    folder.mkdir(parents=True, exist_ok=True)
    existing = {path.name: path for path in folder.iterdir() if path.is_file()}
    ours = {name for name, path in existing.items() if path.read_bytes().startswith(head.encode())}
    if foreign := sorted(files.keys() & existing.keys() - ours):
        raise WouldOverwrite(f"{folder / foreign[0]} was not written by this command; move it, or pass another --out")
    for name, text in files.items():
        write_whole(folder / name, text.encode())
    for stale in sorted(ours - files.keys()):
        existing[stale].unlink()
