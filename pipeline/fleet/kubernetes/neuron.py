"""What makes accelerators known to Kubernetes, and gives a pod those that are connected to each other.

EKS's own scheduler takes no extension. So there is a second one beside it, which pods ask for by `schedulerName`.
"""

from collections.abc import Sequence
from typing import Final

from nxpipe.pipeline.fleet.kubernetes.document import Object, written
from nxpipe.pipeline.fleet.kubernetes.objects import (
    SYSTEM,
    Rule,
    account,
    bound,
    bound_here,
    deployment,
    device_plugin,
    may,
    role_here,
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


def plugin(image: str, types: Sequence[str]) -> list[Object]:
    node: Object = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    config: Object = {"name": "KUBECONFIG", "value": "/etc/kubernetes/kubelet.conf"}
    rules: list[Rule] = [_NODES, _EVENTS, _PODS, ("", ["nodes/status"], ["patch", "update"])]
    return [
        account(PLUGIN),
        *may(PLUGIN, rules),
        device_plugin(PLUGIN, image, types, who=PLUGIN, env=[config, node], folders={"run": "/run"}),
    ]


def extension(image: str) -> list[Object]:
    """Asked by the scheduler below which nodes have enough neighbours free, and which of them a pod gets."""
    rules: list[Rule] = [
        _NODES,
        _EVENTS,
        _PODS,
        ("", ["nodes/status"], ["get", "list", "watch", "patch", "update"]),
        ("", ["bindings", "pods/binding"], ["create"]),
    ]
    container: Object = {
        "image": image,
        "env": [{"name": "PORT", "value": str(_PORT)}],
        "ports": [{"name": "http", "containerPort": _PORT}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
    }
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": EXTENSION, "namespace": SYSTEM},
        "spec": {
            "selector": {"name": EXTENSION},
            "ports": [{"name": "http", "port": _PORT, "targetPort": _PORT}],
        },
    }
    return [account(EXTENSION), *may(EXTENSION, rules), deployment(EXTENSION, container), service]


def scheduler(image: str) -> list[Object]:
    config: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": SCHEDULER, "namespace": SYSTEM},
        "data": {"config.yaml": written([_configuration()]).removeprefix("---\n")},
    }
    probe: Object = {"httpGet": {"path": "/healthz", "port": 10259, "scheme": "HTTPS"}, "initialDelaySeconds": 15}
    container: Object = {
        "image": image,
        "command": ["/usr/local/bin/kube-scheduler", f"--config={_CONFIG}/config.yaml"],
        "livenessProbe": probe,
        "readinessProbe": probe,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "volumeMounts": [{"name": "config", "mountPath": _CONFIG, "readOnly": True}],
    }
    return [
        account(SCHEDULER),
        bound(SCHEDULER, "system:kube-scheduler", SCHEDULER),
        bound(f"{SCHEDULER}-volumes", "system:volume-scheduler", SCHEDULER),
        *_leases(),
        bound_here(f"{SCHEDULER}-callers", "extension-apiserver-authentication-reader", SCHEDULER),
        config,
        deployment(SCHEDULER, container, volumes=[{"name": "config", "configMap": {"name": SCHEDULER}}]),
    ]


def _leases() -> list[Object]:
    """The role of the cluster's own scheduler names its lease, which is another's."""
    group, kind = "coordination.k8s.io", "leases"
    make: Object = {"apiGroups": [group], "resources": [kind], "verbs": ["create"]}
    hold: Object = {
        "apiGroups": [group],
        "resources": [kind],
        "resourceNames": [SCHEDULER],
        "verbs": ["get", "list", "update", "watch"],
    }
    return [role_here(SCHEDULER, [make, hold]), bound_here(SCHEDULER, SCHEDULER, SCHEDULER)]


def _configuration() -> Object:
    extender: Object = {
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
