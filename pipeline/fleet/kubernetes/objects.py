"""Kubernetes objects and their YAML. The same object gives the same bytes, without a YAML library."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from nxpipe.stacks.names import NEURON

YamlValue: TypeAlias = "str | int | bool | Sequence[YamlValue] | Mapping[str, YamlValue]"
KubernetesObject: TypeAlias = Mapping[str, YamlValue]

# Plain scalars that no YAML reader parses as a number, a boolean or null.
_PLAIN: Final = re.compile(r"[A-Za-z_/](?::?[A-Za-z0-9_./@-])*")
_NOT_TEXT: Final = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
_LINES: Final = re.compile(r"[!-~][ -~]*\n(?:[ -~]*\n)*")


def to_yaml(objects: Sequence[KubernetesObject]) -> str:
    """One YAML document per object, keys in their order."""
    return "".join("---\n" + "\n".join(_lines(item, "")) + "\n" for item in objects)


def _lines(value: YamlValue, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{indent}{_text(key)}:", item, indent + "  ")
    else:
        assert isinstance(value, Sequence), "scalars are written beside their key"
        for item in value:
            if isinstance(item, Mapping) and item:
                first, *others = _lines(item, indent + "  ")
                yield f"{indent}- {first.lstrip(' ')}"
                yield from others
            else:
                yield from _entry(f"{indent}-", item, indent + "  ")


def _entry(head: str, value: YamlValue, indent: str) -> Iterator[str]:
    if isinstance(value, str) and _LINES.fullmatch(value) and not value.endswith("\n\n"):
        yield f"{head} |"
        yield from (f"{indent}{line}".rstrip() if not line else f"{indent}{line}" for line in value[:-1].split("\n"))
    elif isinstance(value, str | int):
        yield f"{head} {_scalar(value)}"
    elif value:
        yield head
        yield from _lines(value, indent)
    else:
        yield f"{head} {'{}' if isinstance(value, Mapping) else '[]'}"


def _scalar(value: str | int) -> str:
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return f'"{"".join(map(_character, value))}"'


def _character(char: str) -> str:
    if char in '"\\':
        return f"\\{char}"
    if char.isprintable():
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


SYSTEM: Final = "kube-system"

_RBAC: Final = "rbac.authorization.k8s.io"
_DEVICE_PLUGINS: Final = "/var/lib/kubelet/device-plugins"

Rule = tuple[str, Sequence[str], Sequence[str]]  # API group, resources, verbs

# Device plugins run on nodes that take no other pods, and on nodes under pressure.
_EVERYWHERE: Final[Sequence[KubernetesObject]] = (
    {"key": "CriticalAddonsOnly", "operator": "Exists"},
    {"key": NEURON, "operator": "Exists", "effect": "NoSchedule"},
)


def service_account(name: str, namespace: str = SYSTEM) -> KubernetesObject:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}}


def cluster_role(name: str, rules: Iterable[Rule]) -> list[KubernetesObject]:
    """A cluster role, bound to the account of the same name."""
    role: KubernetesObject = {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [_rule(rule) for rule in rules],
    }
    return [role, cluster_role_binding(name, name, name)]


def cluster_role_binding(name: str, role: str, account: str) -> KubernetesObject:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}],
    }


def namespaced_role(name: str, rules: Iterable[Mapping[str, YamlValue]]) -> KubernetesObject:
    """A role within kube-system."""
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": name, "namespace": SYSTEM},
        "rules": list(rules),
    }


def role_binding(name: str, role: str, account: str) -> KubernetesObject:
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": SYSTEM},
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}],
    }


def device_plugin(
    name: str,
    image: str,
    types: Sequence[str],
    *,
    account: str | None = None,
    host_network: bool = False,
    env: Sequence[KubernetesObject] = (),
    folders: Mapping[str, str] | None = None,
) -> KubernetesObject:
    """A daemon set on nodes of these instance types, which reports their devices to the kubelet."""
    paths = {"device-plugins": _DEVICE_PLUGINS, **(folders or {})}
    container: dict[str, YamlValue] = {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in paths.items()],
    }
    if env:
        container["env"] = list(env)
    pod: dict[str, YamlValue] = {
        "containers": [container],
        "volumes": [{"name": volume, "hostPath": {"path": path}} for volume, path in paths.items()],
    }
    if account:
        pod["serviceAccountName"] = account
    if host_network:
        pod["hostNetwork"] = True
    return daemon_set(name, types, pod)


def daemon_set(name: str, types: Sequence[str], pod: Mapping[str, YamlValue]) -> KubernetesObject:
    """A pod on every node of these instance types."""
    placed: KubernetesObject = {
        "priorityClassName": "system-node-critical",
        "tolerations": list(_EVERYWHERE),
        "affinity": {"nodeAffinity": _of_types(types)},
        **pod,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": SYSTEM},
        "spec": {
            "selector": {"matchLabels": {"name": name}},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": {"name": name}}, "spec": placed},
        },
    }


def deployment(
    name: str, container: Mapping[str, YamlValue], volumes: Sequence[KubernetesObject] = ()
) -> KubernetesObject:
    """A deployment of one pod, with the account of the same name, on nodes without accelerators."""
    pod: dict[str, YamlValue] = {
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


def _rule(rule: Rule) -> KubernetesObject:
    group, resources, verbs = rule
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def _of_types(types: Sequence[str]) -> KubernetesObject:
    term: KubernetesObject = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(types)}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}}
