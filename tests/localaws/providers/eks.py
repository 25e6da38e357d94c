"""EKS clusters: control plane, nodes, add-ons and access."""

from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import labels, listed, removed_tags, shaped


def _retag(eks: Any, arn: str, before: Properties, desired: Properties) -> None:
    if names := removed_tags(before, desired):
        eks.untag_resource(resourceArn=arn, tagKeys=names)
    if labels(desired):
        eks.tag_resource(resourceArn=arn, tags=labels(desired))


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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        eks, name = site.client("eks"), desired.get("Name") or site.name(100)
        arguments = {**_logging(desired), "Name": name, "Tags": labels(desired)}
        cluster = eks.create_cluster(**shaped(eks, "create_cluster", arguments))["cluster"]
        return PhysicalResource(
            name,
            {
                "Arn": cluster["arn"],
                "CertificateAuthorityData": cluster["certificateAuthority"]["data"],
                "ClusterSecurityGroupId": cluster["resourcesVpcConfig"]["clusterSecurityGroupId"],
                "Endpoint": cluster["endpoint"],
                "OpenIdConnectIssuerUrl": cluster["identity"]["oidc"]["issuer"],
            },
            {"BootstrapSelfManagedAddons": desired.get("BootstrapSelfManagedAddons")},
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        eks = site.client("eks")
        if before.get("Version") != desired.get("Version"):
            eks.update_cluster_version(name=resource.id, version=str(desired["Version"]))
        for key in ("AccessConfig", "ComputeConfig", "Logging", "ResourcesVpcConfig", "StorageConfig", "UpgradePolicy"):
            if before.get(key) != desired.get(key):  # EKS accepts one kind of change at a time
                arguments = _logging({"Name": resource.id, key: desired.get(key, {})})
                eks.update_cluster_config(**shaped(eks, "update_cluster_config", arguments))
        _retag(eks, resource.attributes["Arn"], before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("eks").delete_cluster(name=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        cluster = site.client("eks").describe_cluster(name=resource.id)["cluster"]
        kinds = [kind for entry in cluster["logging"]["clusterLogging"] if entry["enabled"] for kind in entry["types"]]
        return {
            **cluster,
            **resource.state,
            "Logging": {"ClusterLogging": {"EnabledTypes": [{"Type": kind} for kind in kinds]}},
            "Tags": listed(cluster.get("tags", {})),
        }


def _logging(desired: Properties) -> dict[str, Any]:
    """The properties with the kinds of logs in one entry; templates have one entry each."""
    result = dict(desired)
    if "Logging" in result:
        kinds = [
            enabled_type["Type"] for enabled_type in result["Logging"].get("ClusterLogging", {}).get("EnabledTypes", [])
        ]
        result["Logging"] = {"ClusterLogging": [{"Types": kinds, "Enabled": True}]}
    return result


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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        eks, name = site.client("eks"), desired.get("NodegroupName") or site.name(63)
        arguments = {**desired, "NodegroupName": name, "Tags": labels(desired)}
        own = frozenset({"ForceUpdateEnabled"})
        nodegroup = eks.create_nodegroup(**shaped(eks, "create_nodegroup", arguments, exclude=own))["nodegroup"]
        cluster = desired["ClusterName"]
        attributes = {"Arn": nodegroup["nodegroupArn"], "ClusterName": cluster, "NodegroupName": name}
        id_ = f"{cluster}/{name}"
        return PhysicalResource(
            id_, {**attributes, "Id": id_}, {"ForceUpdateEnabled": desired.get("ForceUpdateEnabled")}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        eks = site.client("eks")
        which = {key: resource.attributes[key] for key in ("ClusterName", "NodegroupName")}
        settings = {
            key: desired[key] for key in ("NodeRepairConfig", "ScalingConfig", "UpdateConfig") if key in desired
        }
        marks = {"Labels": _change(before.get("Labels", {}), desired.get("Labels", {}))}
        old, new = (entry.get("Taints", []) for entry in (before, desired))
        unwanted = [entry for entry in old if entry not in new]
        arguments = {**which, **settings, **marks, "Taints": {"AddOrUpdateTaints": new, "RemoveTaints": unwanted}}
        eks.update_nodegroup_config(**shaped(eks, "update_nodegroup_config", arguments))
        images = ("LaunchTemplate", "ReleaseVersion", "Version")
        if any(before.get(key) != desired.get(key) for key in images):
            arguments = {**which, **{key: desired[key] for key in images if key in desired}}
            eks.update_nodegroup_version(**shaped(eks, "update_nodegroup_version", arguments))
        _retag(eks, resource.attributes["Arn"], before, desired)
        return PhysicalResource(
            resource.id, resource.attributes, {"ForceUpdateEnabled": desired.get("ForceUpdateEnabled")}
        )

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        cluster, name = resource.id.split("/")
        site.client("eks").delete_nodegroup(clusterName=cluster, nodegroupName=name)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        cluster, name = resource.id.split("/")
        nodegroup = site.client("eks").describe_nodegroup(clusterName=cluster, nodegroupName=name)["nodegroup"]
        return {**nodegroup, **resource.state, "Tags": nodegroup.get("tags", {})}


def _change(before: Properties, desired: Properties) -> dict[str, Any]:
    return {"AddOrUpdateLabels": dict(desired), "RemoveLabels": sorted(set(before) - set(desired))}


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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        eks = site.client("eks")
        arguments = {**desired, "Tags": labels(desired)}
        own = frozenset({"PreserveOnDelete"})
        addon = eks.create_addon(**shaped(eks, "create_addon", arguments, exclude=own))["addon"]
        return self._physical_resource(addon["addonArn"], desired)

    def _physical_resource(self, arn: str, desired: Properties) -> PhysicalResource:
        result = {key: desired[key] for key in ("PreserveOnDelete", "ResolveConflicts") if key in desired}
        return PhysicalResource(f"{desired['ClusterName']}|{desired['AddonName']}", {"Arn": arn}, result)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        eks = site.client("eks")
        own = frozenset({"PreserveOnDelete", "Tags"})
        eks.update_addon(**shaped(eks, "update_addon", desired, exclude=own))
        _retag(eks, resource.attributes["Arn"], before, desired)
        return self._physical_resource(resource.attributes["Arn"], desired)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        cluster, name = resource.id.split("|")
        site.client("eks").delete_addon(clusterName=cluster, addonName=name)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        cluster, name = resource.id.split("|")
        eks = site.client("eks")
        addon = eks.describe_addon(clusterName=cluster, addonName=name)["addon"]
        identities = [_identity(eks, cluster, arn) for arn in addon.get("podIdentityAssociations", ())]
        return {**addon, **resource.state, "podIdentityAssociations": identities, "Tags": listed(addon.get("tags", {}))}


def _identity(eks: Any, cluster: str, arn: str) -> Any:
    """A pod identity association; an add-on lists only ARNs."""
    (id_,) = (part for part in arn.split("/") if part.startswith("a-"))
    return eks.describe_pod_identity_association(clusterName=cluster, associationId=id_)["association"]


@provides
class AccessEntry(Provider):
    type = "AWS::EKS::AccessEntry"
    properties = frozenset(
        {"AccessPolicies", "ClusterName", "KubernetesGroups", "PrincipalArn", "Tags", "Type", "Username"}
    )
    fixed = frozenset({"ClusterName", "PrincipalArn", "Type"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        eks = site.client("eks")
        arguments, own = {**desired, "Tags": labels(desired)}, frozenset({"AccessPolicies"})
        access_entry = eks.create_access_entry(**shaped(eks, "create_access_entry", arguments, exclude=own))[
            "accessEntry"
        ]
        principal, cluster = desired["PrincipalArn"], desired["ClusterName"]
        resource = PhysicalResource(f"{principal}|{cluster}", {"AccessEntryArn": access_entry["accessEntryArn"]})
        site.begin(resource)
        self._policies(eks, _entry(resource), {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        eks = site.client("eks")
        arguments = {key: desired[key] for key in ("KubernetesGroups", "Username") if key in desired}
        eks.update_access_entry(**shaped(eks, "update_access_entry", {**_entry(resource), **arguments}))
        self._policies(eks, _entry(resource), before, desired)
        _retag(eks, resource.attributes["AccessEntryArn"], before, desired)
        return resource

    def _policies(self, eks: Any, entry: dict[str, str], before: Properties, desired: Properties) -> None:
        old, new = (
            {access_policy["PolicyArn"]: access_policy for access_policy in item.get("AccessPolicies", ())}
            for item in (before, desired)
        )
        for arn in sorted(old.keys() - new):
            eks.disassociate_access_policy(**entry, policyArn=arn)
        for item in new.values():
            eks.associate_access_policy(**shaped(eks, "associate_access_policy", {**entry, **item}))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("eks").delete_access_entry(**_entry(resource))

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        eks = site.client("eks")
        access_entry = eks.describe_access_entry(**_entry(resource))["accessEntry"]
        policies = eks.list_associated_access_policies(**_entry(resource))["associatedAccessPolicies"]
        return {**access_entry, "AccessPolicies": policies, "Tags": listed(access_entry.get("tags", {}))}


def _entry(resource: PhysicalResource) -> dict[str, str]:
    principal, cluster = resource.id.split("|")
    return {"principalArn": principal, "clusterName": cluster}


@provides
class PodIdentityAssociation(Provider):
    type = "AWS::EKS::PodIdentityAssociation"
    properties = frozenset({"ClusterName", "Namespace", "RoleArn", "ServiceAccount", "Tags"})
    fixed = frozenset({"ClusterName", "Namespace", "ServiceAccount"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        eks, call = site.client("eks"), "create_pod_identity_association"
        response = eks.create_pod_identity_association(**shaped(eks, call, {**desired, "Tags": labels(desired)}))
        arn, id_ = response["association"]["associationArn"], response["association"]["associationId"]
        return PhysicalResource(
            arn, {"AssociationArn": arn, "AssociationId": id_, "ClusterName": desired["ClusterName"]}
        )

    def _which(self, resource: PhysicalResource) -> dict[str, str]:
        return {
            "clusterName": resource.attributes["ClusterName"],
            "associationId": resource.attributes["AssociationId"],
        }

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        eks = site.client("eks")
        eks.update_pod_identity_association(**self._which(resource), roleArn=desired["RoleArn"])
        _retag(eks, resource.id, before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("eks").delete_pod_identity_association(**self._which(resource))

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        association = site.client("eks").describe_pod_identity_association(**self._which(resource))["association"]
        return {**association, "Tags": listed(association.get("tags", {}))}
