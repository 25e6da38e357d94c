"""What objects have in common: names, accounts and what these may do, and pods that every node of some types runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from nxpipe.pipeline.fleet.kubernetes.document import Object, Value
from nxpipe.stacks.names import NEURON

SYSTEM: Final = "kube-system"

_RBAC: Final = "rbac.authorization.k8s.io"
_DEVICE_PLUGINS: Final = "/var/lib/kubelet/device-plugins"

Rule = tuple[str, Sequence[str], Sequence[str]]  # the group of the API, resources, verbs

# A node that takes no other pod takes these, and so does one that is short of room.
_EVERYWHERE: Final[Sequence[Object]] = (
    {"key": "CriticalAddonsOnly", "operator": "Exists"},
    {"key": NEURON, "operator": "Exists", "effect": "NoSchedule"},
)


def account(name: str, namespace: str = SYSTEM) -> Object:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}


def may(name: str, rules: Iterable[Rule]) -> list[Object]:
    """A role for the whole cluster, and its account in it."""
    role: Object = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [_rule(each) for each in rules],
    }
    return [role, bound(name, name, name)]


def bound(name: str, role: str, who: str) -> Object:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": who, "namespace": SYSTEM}],
    }


def role_here(name: str, rules: Iterable[Mapping[str, Value]]) -> Object:
    """A role for objects of the system's namespace alone."""
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": SYSTEM},
        "rules": list(rules),
    }


def bound_here(name: str, role: str, who: str) -> Object:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": SYSTEM},
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": who, "namespace": SYSTEM}],
    }


def device_plugin(
    name: str,
    image: str,
    types: Sequence[str],
    *,
    who: str | None = None,
    host_network: bool = False,
    env: Sequence[Object] = (),
    folders: Mapping[str, str] | None = None,
) -> Object:
    """On each node of the types, beside the kubelet, which it tells what devices there are."""
    paths = {"device-plugins": _DEVICE_PLUGINS, **(folders or {})}
    container: dict[str, Value] = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "volumeMounts": [{"name": each, "mountPath": path} for each, path in paths.items()],
    }
    if env:
        container["env"] = list(env)
    pod: dict[str, Value] = {
        "priorityClassName": "system-node-critical",
        "tolerations": list(_EVERYWHERE),
        "affinity": {"nodeAffinity": _of_types(types)},
        "containers": [container],
        "volumes": [{"name": each, "hostPath": {"path": path}} for each, path in paths.items()],
    }
    if who:
        pod["serviceAccountName"] = who
    if host_network:
        pod["hostNetwork"] = True
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": SYSTEM},
        "spec": {
            "selector": {"matchLabels": {"name": name}},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": {"name": name}}, "spec": pod},
        },
    }


def deployment(name: str, container: Mapping[str, Value], volumes: Sequence[Object] = ()) -> Object:
    """One pod, as the account of the same name, on nodes without accelerators."""
    pod: dict[str, Value] = {
        "serviceAccountName": name,
        "priorityClassName": "system-cluster-critical",
        "containers": [{"name": name, "imagePullPolicy": "IfNotPresent", **container}],
    }
    if volumes:
        pod["volumes"] = list(volumes)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": SYSTEM},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {"name": name}},
            "template": {"metadata": {"labels": {"name": name}}, "spec": pod},
        },
    }


def _rule(rule: Rule) -> Object:
    group, resources, verbs = rule
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def _of_types(types: Sequence[str]) -> Object:
    wanted: Object = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(types)}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [wanted]}]}}
