"""Clusters of Kubernetes: the control plane, its nodes, and who may do what in it."""

from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import gone, labels, listed, shaped


def _retag(eks: Any, arn: str, before: Properties, wanted: Properties) -> None:
    if names := gone(before, wanted):
        eks.untag_resource(resourceArn=arn, tagKeys=names)
    if labels(wanted):
        eks.tag_resource(resourceArn=arn, tags=labels(wanted))


@provides
class Cluster(Provider):
    type = "AWS::EKS::Cluster"
    properties = frozenset(
        {
            "AccessConfig",
            "BootstrapSelfManagedAddons",
            "ComputeConfig",
            "EncryptionConfig",
            "KubernetesNetworkConfig",
            "Logging",
            "Name",
            "ResourcesVpcConfig",
            "RoleArn",
            "StorageConfig",
            "Tags",
            "UpgradePolicy",
            "Version",
        }
    )
    fixed = frozenset({"BootstrapSelfManagedAddons", "EncryptionConfig", "KubernetesNetworkConfig", "Name", "RoleArn"})

    def create(self, wanted: Properties, at: Site) -> Made:
        eks, name = at.client("eks"), wanted.get("Name") or at.name(100)
        given = {**_logging(wanted), "Name": name, "Tags": labels(wanted)}
        told = eks.create_cluster(**shaped(eks, "create_cluster", given))["cluster"]
        return Made(
            name,
            {
                "Arn": told["arn"],
                "CertificateAuthorityData": told["certificateAuthority"]["data"],
                "ClusterSecurityGroupId": told["resourcesVpcConfig"]["clusterSecurityGroupId"],
                "Endpoint": told["endpoint"],
                "OpenIdConnectIssuerUrl": told["identity"]["oidc"]["issuer"],
            },
            {"BootstrapSelfManagedAddons": wanted.get("BootstrapSelfManagedAddons")},
        )

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        if before.get("Version") != wanted.get("Version"):
            eks.update_cluster_version(name=made.id, version=str(wanted["Version"]))
        for key in ("AccessConfig", "ComputeConfig", "Logging", "ResourcesVpcConfig", "StorageConfig", "UpgradePolicy"):
            if before.get(key) != wanted.get(key):  # EKS takes one kind of change at a time
                given = _logging({"Name": made.id, key: wanted.get(key, {})})
                eks.update_cluster_config(**shaped(eks, "update_cluster_config", given))
        _retag(eks, made.attributes["Arn"], before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("eks").delete_cluster(name=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("eks").describe_cluster(name=made.id)["cluster"]
        kinds = [kind for one in told["logging"]["clusterLogging"] if one["enabled"] for kind in one["types"]]
        return {
            **told,
            **made.kept,
            "Logging": {"ClusterLogging": {"EnabledTypes": [{"Type": kind} for kind in kinds]}},
            "Tags": listed(told.get("tags", {})),
        }


def _logging(wanted: Properties) -> dict[str, Any]:
    """Templates list the kinds of logs one by one."""
    found = dict(wanted)
    if "Logging" in found:
        kinds = [one["Type"] for one in found["Logging"].get("ClusterLogging", {}).get("EnabledTypes", [])]
        found["Logging"] = {"ClusterLogging": [{"Types": kinds, "Enabled": True}]}
    return found


@provides
class Nodegroup(Provider):
    type = "AWS::EKS::Nodegroup"
    properties = frozenset(
        {
            "AmiType",
            "CapacityType",
            "ClusterName",
            "DiskSize",
            "ForceUpdateEnabled",
            "InstanceTypes",
            "Labels",
            "LaunchTemplate",
            "NodeRepairConfig",
            "NodeRole",
            "NodegroupName",
            "ReleaseVersion",
            "ScalingConfig",
            "Subnets",
            "Tags",
            "Taints",
            "UpdateConfig",
            "Version",
        }
    )
    fixed = frozenset(
        {"AmiType", "CapacityType", "ClusterName", "DiskSize", "InstanceTypes", "NodeRole", "NodegroupName", "Subnets"}
    )

    def create(self, wanted: Properties, at: Site) -> Made:
        eks, name = at.client("eks"), wanted.get("NodegroupName") or at.name(63)
        given = {**wanted, "NodegroupName": name, "Tags": labels(wanted)}
        own = frozenset({"ForceUpdateEnabled"})
        told = eks.create_nodegroup(**shaped(eks, "create_nodegroup", given, but=own))["nodegroup"]
        cluster = wanted["ClusterName"]
        attributes = {"Arn": told["nodegroupArn"], "ClusterName": cluster, "NodegroupName": name}
        id_ = f"{cluster}/{name}"
        return Made(id_, {**attributes, "Id": id_}, {"ForceUpdateEnabled": wanted.get("ForceUpdateEnabled")})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        which = {key: made.attributes[key] for key in ("ClusterName", "NodegroupName")}
        settings = {key: wanted[key] for key in ("NodeRepairConfig", "ScalingConfig", "UpdateConfig") if key in wanted}
        marks = {"Labels": _change(before.get("Labels", {}), wanted.get("Labels", {}))}
        old, new = (each.get("Taints", []) for each in (before, wanted))
        unwanted = [one for one in old if one not in new]
        given = {**which, **settings, **marks, "Taints": {"AddOrUpdateTaints": new, "RemoveTaints": unwanted}}
        eks.update_nodegroup_config(**shaped(eks, "update_nodegroup_config", given))
        images = ("LaunchTemplate", "ReleaseVersion", "Version")
        if any(before.get(key) != wanted.get(key) for key in images):
            given = {**which, **{key: wanted[key] for key in images if key in wanted}}
            eks.update_nodegroup_version(**shaped(eks, "update_nodegroup_version", given))
        _retag(eks, made.attributes["Arn"], before, wanted)
        return Made(made.id, made.attributes, {"ForceUpdateEnabled": wanted.get("ForceUpdateEnabled")})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        cluster, name = made.id.split("/")
        at.client("eks").delete_nodegroup(clusterName=cluster, nodegroupName=name)

    def read(self, made: Made, at: Site) -> Properties:
        cluster, name = made.id.split("/")
        told = at.client("eks").describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
        return {**told, **made.kept, "Tags": told.get("tags", {})}


def _change(before: Properties, wanted: Properties) -> dict[str, Any]:
    return {"AddOrUpdateLabels": dict(wanted), "RemoveLabels": sorted(set(before) - set(wanted))}


@provides
class Addon(Provider):
    type = "AWS::EKS::Addon"
    properties = frozenset(
        {
            "AddonName",
            "AddonVersion",
            "ClusterName",
            "ConfigurationValues",
            "PodIdentityAssociations",
            "PreserveOnDelete",
            "ResolveConflicts",
            "ServiceAccountRoleArn",
            "Tags",
        }
    )
    fixed = frozenset({"AddonName", "ClusterName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        given = {**wanted, "Tags": labels(wanted)}
        own = frozenset({"PreserveOnDelete"})
        told = eks.create_addon(**shaped(eks, "create_addon", given, but=own))["addon"]
        return self._made(told["addonArn"], wanted)

    def _made(self, arn: str, wanted: Properties) -> Made:
        said = {key: wanted[key] for key in ("PreserveOnDelete", "ResolveConflicts") if key in wanted}
        return Made(f"{wanted['ClusterName']}|{wanted['AddonName']}", {"Arn": arn}, said)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        own = frozenset({"PreserveOnDelete", "Tags"})
        eks.update_addon(**shaped(eks, "update_addon", wanted, but=own))
        _retag(eks, made.attributes["Arn"], before, wanted)
        return self._made(made.attributes["Arn"], wanted)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        cluster, name = made.id.split("|")
        at.client("eks").delete_addon(clusterName=cluster, addonName=name)

    def read(self, made: Made, at: Site) -> Properties:
        cluster, name = made.id.split("|")
        eks = at.client("eks")
        told = eks.describe_addon(clusterName=cluster, addonName=name)["addon"]
        identities = [_identity(eks, cluster, arn) for arn in told.get("podIdentityAssociations", ())]
        return {**told, **made.kept, "podIdentityAssociations": identities, "Tags": listed(told.get("tags", {}))}


def _identity(eks: Any, cluster: str, arn: str) -> Any:
    """An add-on tells the ARNs of its associations only."""
    (id_,) = (part for part in arn.split("/") if part.startswith("a-"))
    return eks.describe_pod_identity_association(clusterName=cluster, associationId=id_)["association"]


@provides
class AccessEntry(Provider):
    type = "AWS::EKS::AccessEntry"
    properties = frozenset(
        {"AccessPolicies", "ClusterName", "KubernetesGroups", "PrincipalArn", "Tags", "Type", "Username"}
    )
    fixed = frozenset({"ClusterName", "PrincipalArn", "Type"})

    def create(self, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        given, own = {**wanted, "Tags": labels(wanted)}, frozenset({"AccessPolicies"})
        told = eks.create_access_entry(**shaped(eks, "create_access_entry", given, but=own))["accessEntry"]
        who, cluster = wanted["PrincipalArn"], wanted["ClusterName"]
        made = Made(f"{who}|{cluster}", {"AccessEntryArn": told["accessEntryArn"]})
        at.begin(made)
        self._policies(eks, _entry(made), {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        given = {key: wanted[key] for key in ("KubernetesGroups", "Username") if key in wanted}
        eks.update_access_entry(**shaped(eks, "update_access_entry", {**_entry(made), **given}))
        self._policies(eks, _entry(made), before, wanted)
        _retag(eks, made.attributes["AccessEntryArn"], before, wanted)
        return made

    def _policies(self, eks: Any, entry: dict[str, str], before: Properties, wanted: Properties) -> None:
        old, new = ({one["PolicyArn"]: one for one in each.get("AccessPolicies", ())} for each in (before, wanted))
        for arn in sorted(old.keys() - new):
            eks.disassociate_access_policy(**entry, policyArn=arn)
        for one in new.values():
            eks.associate_access_policy(**shaped(eks, "associate_access_policy", {**entry, **one}))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("eks").delete_access_entry(**_entry(made))

    def read(self, made: Made, at: Site) -> Properties:
        eks = at.client("eks")
        told = eks.describe_access_entry(**_entry(made))["accessEntry"]
        policies = eks.list_associated_access_policies(**_entry(made))["associatedAccessPolicies"]
        return {**told, "AccessPolicies": policies, "Tags": listed(told.get("tags", {}))}


def _entry(made: Made) -> dict[str, str]:
    who, cluster = made.id.split("|")
    return {"principalArn": who, "clusterName": cluster}


@provides
class PodIdentityAssociation(Provider):
    type = "AWS::EKS::PodIdentityAssociation"
    properties = frozenset({"ClusterName", "Namespace", "RoleArn", "ServiceAccount", "Tags"})
    fixed = frozenset({"ClusterName", "Namespace", "ServiceAccount"})

    def create(self, wanted: Properties, at: Site) -> Made:
        eks, call = at.client("eks"), "create_pod_identity_association"
        told = eks.create_pod_identity_association(**shaped(eks, call, {**wanted, "Tags": labels(wanted)}))
        arn, id_ = told["association"]["associationArn"], told["association"]["associationId"]
        return Made(arn, {"AssociationArn": arn, "AssociationId": id_, "ClusterName": wanted["ClusterName"]})

    def _which(self, made: Made) -> dict[str, str]:
        return {"clusterName": made.attributes["ClusterName"], "associationId": made.attributes["AssociationId"]}

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        eks = at.client("eks")
        eks.update_pod_identity_association(**self._which(made), roleArn=wanted["RoleArn"])
        _retag(eks, made.id, before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("eks").delete_pod_identity_association(**self._which(made))

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("eks").describe_pod_identity_association(**self._which(made))["association"]
        return {**told, "Tags": listed(told.get("tags", {}))}
