"""Schemas of the few kinds of objects that we write, from the Kubernetes API reference and Karpenter's definitions.

They are minimal: an unlisted field fails, so that new fields are checked against the reference.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Shape: TypeAlias = Any  # a type, a pattern, a list of one shape, a Table, Names, or an enumeration


@dataclass(frozen=True)
class Table:
    """An object with required and optional fields."""

    must: Mapping[str, Shape]
    may: Mapping[str, Shape]


@dataclass(frozen=True)
class Names:
    """A map with free keys."""

    values: Shape = str


def table(must: Mapping[str, Shape] | None = None, **may: Shape) -> Table:
    return Table(must or {}, may)


def faults(value: Any, shape: Shape, path: str = "") -> Iterator[str]:
    """The errors of a value, with their paths."""
    if isinstance(shape, Table):
        yield from _faults_of_object(value, shape, path)
    elif isinstance(shape, Names):
        for name, item in value.items():
            yield from faults(name, str, f"{path}.{name}")
            yield from faults(item, shape.values, f"{path}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list) or not value:
            yield f"{path}: no list, or an empty one"
        else:
            for index, item in enumerate(value):
                yield from faults(item, shape[0], f"{path}[{index}]")
    elif not _fits(value, shape):
        yield f"{path}: {value!r} is not {shape}"


def _faults_of_object(value: Any, shape: Table, path: str) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield f"{path}: no object"
        return
    yield from (f"{path}: no {name}" for name in shape.must if name not in value)
    known = {**shape.must, **shape.may}
    for name, item in value.items():
        if name in known:
            yield from faults(item, known[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: unknown"


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, re.Pattern):
        return isinstance(value, str) and shape.fullmatch(value) is not None
    return value in shape if isinstance(shape, set) else type(value) is shape


NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_IMAGE: Final = re.compile(r"[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com/[a-z0-9._/-]+@sha256:[0-9a-f]{64}")
_QUANTITY: Final = re.compile(r"[0-9]+(m|Mi|Gi)?")
_GROUP: Final = "rbac.authorization.k8s.io"

_META: Final = table({"name": NAME, "namespace": LABEL})
_META_OF_CLUSTER: Final = table({"name": NAME})
_ROLE_NAME: Final = re.compile(r"[a-z0-9:.-]+")

_TOLERATION: Final = table({"key": str}, operator={"Exists", "Equal"}, value=str, effect={"NoSchedule", "NoExecute"})
_TERM: Final = table({"key": str, "operator": {"In", "NotIn", "Exists", "DoesNotExist"}}, values=[str])
_AFFINITY: Final = table(
    nodeAffinity=table(
        requiredDuringSchedulingIgnoredDuringExecution=table({"nodeSelectorTerms": [table(matchExpressions=[_TERM])]})
    )
)
_PROBE: Final = table(
    httpGet=table({"port": int}, path=str, scheme={"HTTP", "HTTPS"}), initialDelaySeconds=int, periodSeconds=int
)
_CONTAINER: Final = table(
    {"name": LABEL, "image": _IMAGE},
    imagePullPolicy={"IfNotPresent", "Always", "Never"},
    args=[str],
    command=[str],
    env=[table({"name": str}, value=str, valueFrom=table(fieldRef=table({"fieldPath": str})))],
    ports=[table({"containerPort": int}, name=LABEL)],
    livenessProbe=_PROBE,
    readinessProbe=_PROBE,
    resources=table(requests=Names(_QUANTITY), limits=Names(_QUANTITY)),
    securityContext=table(allowPrivilegeEscalation=bool, capabilities=table(drop=[str]), privileged=bool),
    volumeMounts=[table({"name": LABEL, "mountPath": str}, readOnly=bool)],
)
_VOLUME: Final = table({"name": LABEL}, hostPath=table({"path": str}), configMap=table(name=NAME))
_POD: Final = table(
    {"containers": [_CONTAINER]},
    affinity=_AFFINITY,
    hostNetwork=bool,
    priorityClassName={"system-node-critical", "system-cluster-critical"},
    serviceAccountName=NAME,
    tolerations=[_TOLERATION],
    volumes=[_VOLUME],
)
_TEMPLATE: Final = table({"metadata": table(labels=Names()), "spec": _POD})
_SELECTOR: Final = table(matchLabels=Names())
_RULE: Final = table({"verbs": [str]}, apiGroups=[str], resources=[str], resourceNames=[str])


def _binding(kind: str) -> Table:
    return table(
        {
            "roleRef": table({"apiGroup": {_GROUP}, "kind": {kind}, "name": _ROLE_NAME}),
            "subjects": [table({"kind": {"ServiceAccount"}, "name": NAME, "namespace": LABEL})],
        }
    )


_TAGS: Final = table(tags=Names(), id=re.compile("(subnet|sg|ami|cr)-[0-9a-z]+"))
_NODE_CLASS: Final = table(
    {"amiSelectorTerms": [_TAGS], "securityGroupSelectorTerms": [_TAGS], "subnetSelectorTerms": [_TAGS]},
    amiFamily={"AL2023"},
    blockDeviceMappings=[
        table(
            deviceName=str,
            ebs=table(
                volumeType={"gp3"}, volumeSize=re.compile("[1-9][0-9]{0,3}Gi"), encrypted=bool, deleteOnTermination=bool
            ),
        )
    ],
    capacityReservationSelectorTerms=[_TAGS],
    detailedMonitoring=bool,
    instanceProfile=str,
    metadataOptions=table(
        httpEndpoint={"enabled", "disabled"}, httpTokens={"required", "optional"}, httpPutResponseHopLimit=int
    ),
    networkInterfaces=[
        table({"networkCardIndex": int, "deviceIndex": int, "interfaceType": {"interface", "efa-only"}})
    ],
    tags=Names(),
    userData=str,
)
_NODE_POOL: Final = table(
    {
        "template": table(
            {
                "spec": table(
                    {
                        "nodeClassRef": table({"group": NAME, "kind": {"EC2NodeClass"}, "name": NAME}),
                        "requirements": [_TERM],
                    },
                    taints=[table({"key": str, "effect": {"NoSchedule"}}, value=str)],
                )
            }
        )
    },
    limits=Names(_QUANTITY),
    disruption=table(
        {"consolidateAfter": re.compile("([0-9]+(s|m|h))+|Never")},
        consolidationPolicy={"WhenEmpty", "WhenEmptyOrUnderutilized"},
    ),
)

# By version and kind: the shape of metadata, and the other fields.
_KINDS: Final[Mapping[tuple[str, str], tuple[Table, Table]]] = {
    ("v1", "Namespace"): (_META_OF_CLUSTER, table()),
    ("v1", "ServiceAccount"): (_META, table()),
    ("v1", "ConfigMap"): (_META, table(data=Names())),
    ("v1", "Service"): (
        _META,
        table({"spec": table(selector=Names(), ports=[table({"port": int}, name=LABEL, targetPort=int)])}),
    ),
    (f"{_GROUP}/v1", "ClusterRole"): (_META_OF_CLUSTER, table({"rules": [_RULE]})),
    (f"{_GROUP}/v1", "Role"): (_META, table({"rules": [_RULE]})),
    (f"{_GROUP}/v1", "ClusterRoleBinding"): (_META_OF_CLUSTER, _binding("ClusterRole")),
    (f"{_GROUP}/v1", "RoleBinding"): (_META, _binding("Role")),
    ("apps/v1", "DaemonSet"): (
        _META,
        table(
            {
                "spec": table(
                    {"selector": _SELECTOR, "template": _TEMPLATE}, updateStrategy=table(type={"RollingUpdate"})
                )
            }
        ),
    ),
    ("apps/v1", "Deployment"): (
        _META,
        table(
            {
                "spec": table(
                    {"selector": _SELECTOR, "template": _TEMPLATE},
                    replicas=int,
                    strategy=table(type={"Recreate", "RollingUpdate"}),
                )
            }
        ),
    ),
    ("karpenter.k8s.aws/v1", "EC2NodeClass"): (_META_OF_CLUSTER, table({"spec": _NODE_CLASS})),
    ("karpenter.sh/v1", "NodePool"): (_META_OF_CLUSTER, table({"spec": _NODE_POOL})),
}


def complaints(document: Any) -> list[str]:
    key = (str(document.get("apiVersion")), str(document.get("kind")))
    if key not in _KINDS:
        return [f"no kind {key} is known"]
    metadata, rest = _KINDS[key]
    whole = Table({"apiVersion": str, "kind": str, "metadata": metadata, **rest.must}, rest.may)
    return list(faults(document, whole, key[1]))
