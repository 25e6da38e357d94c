"""Storage for EKS records that moto does not have, by kind, cluster and name."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from moto.core.responses import ActionResult
from moto.core.utils import utcnow
from moto.eks.exceptions import ResourceNotFoundException
from moto.eks.models import EKSBackend

Record = dict[str, Any]
KINDS = ("addons", "access", "identities")


def all_of(backend: EKSBackend, kind: str) -> dict[tuple[str, str], Record]:
    records: dict[tuple[str, str], Record] = vars(backend).setdefault(f"own_{kind}", {})
    return records


def cluster_name(self: Any) -> str:
    """The name of the request's cluster; raises if it does not exist."""
    name: str = self._get_param("clusterName") or self._get_param("name")
    self.eks_backend.describe_cluster(name)
    return name


def record_of(self: Any, kind: str, key: str) -> Record:
    records, cluster = all_of(self.eks_backend, kind), cluster_name(self)
    if (cluster, key) not in records:
        raise not_found(f"{kind} {key} of {cluster}")
    return records[cluster, key]


def put(self: Any, kind: str, key: str, record: Mapping[str, Any]) -> Record:
    usual = {"createdAt": utcnow(), "modifiedAt": utcnow(), "tags": self._get_param("tags") or {}}
    stored = {**usual, **{name: value for name, value in record.items() if value is not None}}
    all_of(self.eks_backend, kind)[cluster_name(self), key] = stored
    return stored


def arn_of(self: Any, kind: str, path: str) -> str:
    return f"arn:aws:eks:{self.region}:{self.current_account}:{kind}/{cluster_name(self)}/{path}/{uuid.uuid4()}"


def change(record: Record, get: Callable[[str], Any], *names: str) -> None:
    record.update({name: value for name in names if (value := get(name)) is not None}, modifiedAt=utcnow())


def not_found(resource: str) -> ResourceNotFoundException:
    return ResourceNotFoundException(
        clusterName=None,
        nodegroupName=None,
        fargateProfileName=None,
        addonName=None,
        message=f"No {resource} found",
    )


def update(kind: str) -> ActionResult:
    return ActionResult({"update": {"id": str(uuid.uuid4()), "status": "Successful", "type": kind}})
