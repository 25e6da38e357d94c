"""Neuron's device plugin and scheduler extension: they make accelerators schedulable, in groups of connected ones.

EKS's own scheduler accepts no extension, so a second scheduler runs beside it, selected by a pod's `schedulerName`.
"""

from collections.abc import Sequence
from typing import Final

from nxpipe.pipeline.fleet.kubernetes.objects import (
    SYSTEM,
    KubernetesObject,
    Rule,
    cluster_role,
    cluster_role_binding,
    deployment,
    device_plugin,
    namespaced_role,
    role_binding,
    service_account,
    to_yaml,
)

PLUGIN: Final = "neuron-device-plugin"
EXTENSION: Final = "neuron-scheduler-extension"
SCHEDULER: Final = "neuron-scheduler"

_PORT: Final = 12345
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
        "managedResources": [{"name": each, "ignoredByScheduler": False} for each in _RESOURCES],
        "ignorable": False,
    }
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": True, "resourceNamespace": SYSTEM, "resourceName": SCHEDULER},
        "profiles": [{"schedulerName": SCHEDULER}],
        "extenders": [extender],
    }
