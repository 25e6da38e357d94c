"""EKS: add-ons, access entries and pod identity associations, which moto does not have."""

import uuid
from typing import Any, Final

from moto.core.responses import ActionResult, EmptyResult
from moto.core.utils import utcnow
from moto.eks.responses import EKSResponse

from tests.localaws.moto_patches._eks import (
    Record,
    all_of,
    arn_of,
    change,
    cluster_name,
    not_found,
    put,
    record_of,
    update,
)


def apply() -> None:
    for call in (
        *(create_addon, describe_addon, update_addon, delete_addon, list_addons),
        *(create_access_entry, describe_access_entry, update_access_entry, delete_access_entry),
        *(associate_access_policy, disassociate_access_policy, list_associated_access_policies),
        *(create_pod_identity_association, describe_pod_identity_association),
        *(update_pod_identity_association, delete_pod_identity_association),
    ):
        setattr(EKSResponse, call.__name__, call)


_OF_AN_ADDON: Final = ("addonVersion", "configurationValues", "serviceAccountRoleArn")
_WHERE_ADDONS_RUN: Final = "kube-system"


def create_addon(self: Any) -> ActionResult:
    name = self._get_param("addonName")
    record = {
        "addonArn": arn_of(self, "addon", name),
        "addonName": name,
        "clusterName": cluster_name(self),
        "status": "ACTIVE",
    }
    addon = put(self, "addons", name, {**record, **{key: self._get_param(key) for key in _OF_AN_ADDON}})
    _identify(self, addon)
    return ActionResult({"addon": addon})


def _identify(self: Any, addon: Record) -> None:
    """Create the pod identity associations of an add-on's request; the add-on lists their ARNs."""
    if (associations := self._get_param("podIdentityAssociations")) is None:
        return
    _forget_identities(self, addon)
    addon["podIdentityAssociations"] = [
        _create_identity(self, {**association, "namespace": _WHERE_ADDONS_RUN})["associationArn"]
        for association in associations
    ]


def _forget_identities(self: Any, addon: Record) -> None:
    records, old = all_of(self.eks_backend, "identities"), addon.pop("podIdentityAssociations", ())
    for key in [key for key, record in records.items() if record["associationArn"] in old]:
        del records[key]


def describe_addon(self: Any) -> ActionResult:
    return ActionResult({"addon": record_of(self, "addons", self._get_param("addonName"))})


def update_addon(self: Any) -> ActionResult:
    record = record_of(self, "addons", self._get_param("addonName"))
    change(record, self._get_param, *_OF_AN_ADDON)
    _identify(self, record)
    return update("AddonUpdate")


def delete_addon(self: Any) -> ActionResult:
    record = record_of(self, "addons", self._get_param("addonName"))
    _forget_identities(self, record)
    del all_of(self.eks_backend, "addons")[cluster_name(self), record["addonName"]]
    return ActionResult({"addon": {**record, "status": "DELETING"}})


def list_addons(self: Any) -> ActionResult:
    cluster = cluster_name(self)
    return ActionResult(
        {"addons": [name for addon_cluster, name in all_of(self.eks_backend, "addons") if addon_cluster == cluster]}
    )


def create_access_entry(self: Any) -> ActionResult:
    principal = self._get_param("principalArn")
    record = {
        "accessEntryArn": arn_of(self, "access-entry", "role"),
        "clusterName": cluster_name(self),
        "kubernetesGroups": self._get_param("kubernetesGroups") or [],
        "policies": {},
        "principalArn": principal,
        "type": self._get_param("type") or "STANDARD",
        "username": self._get_param("username") or principal,
    }
    return ActionResult({"accessEntry": put(self, "access", principal, record)})


def _entry(self: Any) -> Record:
    return record_of(self, "access", self._get_param("principalArn"))


def describe_access_entry(self: Any) -> ActionResult:
    return ActionResult({"accessEntry": _entry(self)})


def update_access_entry(self: Any) -> ActionResult:
    change(_entry(self), self._get_param, "kubernetesGroups", "username")
    return describe_access_entry(self)


def delete_access_entry(self: Any) -> EmptyResult:
    del all_of(self.eks_backend, "access")[cluster_name(self), _entry(self)["principalArn"]]
    return EmptyResult()


def associate_access_policy(self: Any) -> ActionResult:
    record, policy = _entry(self), self._get_param("policyArn")
    record["policies"][policy] = {
        "policyArn": policy,
        "accessScope": self._get_param("accessScope"),
        "associatedAt": utcnow(),
        "modifiedAt": utcnow(),
    }
    which = {"clusterName": record["clusterName"], "principalArn": record["principalArn"]}
    return ActionResult({**which, "associatedAccessPolicy": record["policies"][policy]})


def disassociate_access_policy(self: Any) -> EmptyResult:
    if _entry(self)["policies"].pop(self._get_param("policyArn"), None) is None:
        raise not_found(f"associated policy {self._get_param('policyArn')}")
    return EmptyResult()


def list_associated_access_policies(self: Any) -> ActionResult:
    record = _entry(self)
    which = {"clusterName": record["clusterName"], "principalArn": record["principalArn"]}
    return ActionResult({**which, "associatedAccessPolicies": list(record["policies"].values())})


def create_pod_identity_association(self: Any) -> ActionResult:
    fields = {name: self._get_param(name) for name in ("namespace", "serviceAccount", "roleArn")}
    return ActionResult({"association": _create_identity(self, fields)})


def _create_identity(self: Any, fields: Record) -> Record:
    id_ = f"a-{uuid.uuid4().hex[:17]}"
    record = {
        "associationArn": arn_of(self, "podidentityassociation", id_),
        "associationId": id_,
        "clusterName": cluster_name(self),
        **fields,
    }
    return put(self, "identities", id_, record)


def _identity(self: Any) -> Record:
    return record_of(self, "identities", self._get_param("associationId"))


def describe_pod_identity_association(self: Any) -> ActionResult:
    return ActionResult({"association": _identity(self)})


def update_pod_identity_association(self: Any) -> ActionResult:
    change(_identity(self), self._get_param, "roleArn")
    return describe_pod_identity_association(self)


def delete_pod_identity_association(self: Any) -> ActionResult:
    record = _identity(self)
    del all_of(self.eks_backend, "identities")[cluster_name(self), record["associationId"]]
    return ActionResult({"association": record})
