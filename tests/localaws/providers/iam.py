"""IAM roles, policies, instance profiles and the OIDC provider of GitHub."""

import json
from collections.abc import Mapping
from typing import Any

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import tags


@provides
class Role(Provider):
    type = "AWS::IAM::Role"
    properties = frozenset(
        {
            "AssumeRolePolicyDocument",
            "Description",
            "ManagedPolicyArns",
            "MaxSessionDuration",
            "Path",
            "PermissionsBoundary",
            "Policies",
            "RoleName",
            "Tags",
        }
    )
    fixed = frozenset({"RoleName", "Path"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        iam, name = site.client("iam"), desired.get("RoleName") or site.name(64)
        arguments = {key: desired[key] for key in ("Path", "Description", "PermissionsBoundary") if key in desired}
        if "MaxSessionDuration" in desired:
            arguments["MaxSessionDuration"] = int(desired["MaxSessionDuration"])
        role = iam.create_role(
            RoleName=name,
            AssumeRolePolicyDocument=json.dumps(desired["AssumeRolePolicyDocument"]),
            Tags=tags(desired),
            **arguments,
        )["Role"]
        resource = PhysicalResource(name, {"Arn": role["Arn"], "RoleId": role["RoleId"]})
        site.begin(resource)
        self._policies(iam, name, {}, desired)
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        iam = site.client("iam")
        iam.update_assume_role_policy(
            RoleName=resource.id, PolicyDocument=json.dumps(desired["AssumeRolePolicyDocument"])
        )
        arguments = {"Description": desired.get("Description", "")}
        iam.update_role(
            RoleName=resource.id, MaxSessionDuration=int(desired.get("MaxSessionDuration", 3600)), **arguments
        )
        if before.get("PermissionsBoundary") != desired.get("PermissionsBoundary"):
            if "PermissionsBoundary" in desired:
                iam.put_role_permissions_boundary(
                    RoleName=resource.id, PermissionsBoundary=desired["PermissionsBoundary"]
                )
            else:
                iam.delete_role_permissions_boundary(RoleName=resource.id)
        self._policies(iam, resource.id, before, desired)
        if removed_tags := [
            tag["Key"] for tag in tags(before) if tag["Key"] not in {entry["Key"] for entry in tags(desired)}
        ]:
            iam.untag_role(RoleName=resource.id, TagKeys=removed_tags)
        iam.tag_role(RoleName=resource.id, Tags=tags(desired))
        return resource

    def _policies(self, iam: Any, name: str, before: Properties, desired: Properties) -> None:
        old, new = (set(entry.get("ManagedPolicyArns", ())) for entry in (before, desired))
        for arn in sorted(old - new):
            iam.detach_role_policy(RoleName=name, PolicyArn=arn)
        for arn in sorted(new - old):
            iam.attach_role_policy(RoleName=name, PolicyArn=arn)
        inline = {entry["PolicyName"]: entry["PolicyDocument"] for entry in desired.get("Policies", ())}
        for policy_name in {entry["PolicyName"] for entry in before.get("Policies", ())} - inline.keys():
            iam.delete_role_policy(RoleName=name, PolicyName=policy_name)
        for policy, document in inline.items():
            iam.put_role_policy(RoleName=name, PolicyName=policy, PolicyDocument=json.dumps(document))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        iam = site.client("iam")
        for attached_policy in iam.list_attached_role_policies(RoleName=resource.id)["AttachedPolicies"]:
            iam.detach_role_policy(RoleName=resource.id, PolicyArn=attached_policy["PolicyArn"])
        for name in iam.list_role_policies(RoleName=resource.id)["PolicyNames"]:
            iam.delete_role_policy(RoleName=resource.id, PolicyName=name)
        iam.delete_role(RoleName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        iam = site.client("iam")
        role = iam.get_role(RoleName=resource.id)["Role"]
        names = iam.list_role_policies(RoleName=resource.id)["PolicyNames"]
        attached = iam.list_attached_role_policies(RoleName=resource.id)["AttachedPolicies"]
        return {
            **role,
            "ManagedPolicyArns": [entry["PolicyArn"] for entry in attached],
            "PermissionsBoundary": role.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn"),
            "Policies": [
                {
                    "PolicyName": name,
                    "PolicyDocument": iam.get_role_policy(RoleName=resource.id, PolicyName=name)["PolicyDocument"],
                }
                for name in names
            ],
            "Tags": iam.list_role_tags(RoleName=resource.id)["Tags"],
        }


@provides
class Policy(Provider):
    """An inline policy, on each of the roles in its `Roles`."""

    type = "AWS::IAM::Policy"
    properties = frozenset({"PolicyDocument", "PolicyName", "Roles"})
    fixed = frozenset({"PolicyName"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        for role in desired["Roles"]:
            site.client("iam").put_role_policy(
                RoleName=role, PolicyName=desired["PolicyName"], PolicyDocument=json.dumps(desired["PolicyDocument"])
            )
        return PhysicalResource(
            site.name(64), {"Id": desired["PolicyName"], "PolicyName": desired["PolicyName"], "Roles": desired["Roles"]}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        for role in set(before["Roles"]) - set(desired["Roles"]):
            site.client("iam").delete_role_policy(RoleName=role, PolicyName=desired["PolicyName"])
        changed = self.create(desired, site)
        return PhysicalResource(resource.id, changed.attributes)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        iam = site.client("iam")
        for role in properties["Roles"]:
            iam.delete_role_policy(RoleName=role, PolicyName=properties["PolicyName"])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        iam, name = site.client("iam"), resource.attributes["PolicyName"]
        documents = [
            iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
            for role in resource.attributes["Roles"]
        ]
        return {"PolicyName": name, "Roles": resource.attributes["Roles"], "PolicyDocument": documents[0]}


@provides
class ManagedPolicy(Provider):
    type = "AWS::IAM::ManagedPolicy"
    properties = frozenset({"Description", "ManagedPolicyName", "Path", "PolicyDocument", "Roles"})
    fixed = frozenset({"Description", "ManagedPolicyName", "Path"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        iam = site.client("iam")
        arguments = {key: desired[key] for key in ("Description", "Path") if key in desired}
        arn = iam.create_policy(
            PolicyName=desired.get("ManagedPolicyName") or site.name(128),
            PolicyDocument=json.dumps(desired["PolicyDocument"]),
            **arguments,
        )["Policy"]["Arn"]
        resource = PhysicalResource(arn, {"PolicyArn": arn})
        site.begin(resource)
        self._attach(iam, arn, set(), set(desired.get("Roles", ())))
        return resource

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        iam = site.client("iam")
        if before["PolicyDocument"] != desired["PolicyDocument"]:
            old = [
                version
                for version in iam.list_policy_versions(PolicyArn=resource.id)["Versions"]
                if not version["IsDefaultVersion"]
            ]
            if len(old) >= 4:  # AWS permits five versions
                iam.delete_policy_version(PolicyArn=resource.id, VersionId=old[-1]["VersionId"])
            document = json.dumps(desired["PolicyDocument"])
            iam.create_policy_version(PolicyArn=resource.id, PolicyDocument=document, SetAsDefault=True)
        self._attach(iam, resource.id, set(before.get("Roles", ())), set(desired.get("Roles", ())))
        return resource

    def _attach(self, iam: Any, arn: str, before: set[str], desired: set[str]) -> None:
        for role in sorted(before - desired):
            iam.detach_role_policy(RoleName=role, PolicyArn=arn)
        for role in sorted(desired - before):
            iam.attach_role_policy(RoleName=role, PolicyArn=arn)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        iam = site.client("iam")
        for policy_role in iam.list_entities_for_policy(PolicyArn=resource.id)["PolicyRoles"]:
            iam.detach_role_policy(RoleName=policy_role["RoleName"], PolicyArn=resource.id)
        for version in iam.list_policy_versions(PolicyArn=resource.id)["Versions"]:
            if not version["IsDefaultVersion"]:
                iam.delete_policy_version(PolicyArn=resource.id, VersionId=version["VersionId"])
        iam.delete_policy(PolicyArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        iam = site.client("iam")
        policy = iam.get_policy(PolicyArn=resource.id)["Policy"]
        version = iam.get_policy_version(PolicyArn=resource.id, VersionId=policy["DefaultVersionId"])["PolicyVersion"]
        roles = iam.list_entities_for_policy(PolicyArn=resource.id)["PolicyRoles"]
        return {
            **policy,
            "ManagedPolicyName": policy["PolicyName"],
            "PolicyDocument": version["Document"],
            "Roles": [role["RoleName"] for role in roles],
        }


@provides
class InstanceProfile(Provider):
    type = "AWS::IAM::InstanceProfile"
    properties = frozenset({"InstanceProfileName", "Path", "Roles"})
    fixed = frozenset({"InstanceProfileName", "Path"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        iam, name = site.client("iam"), desired.get("InstanceProfileName") or site.name(128)
        arguments = {"Path": desired["Path"]} if "Path" in desired else {}
        arn = iam.create_instance_profile(InstanceProfileName=name, **arguments)["InstanceProfile"]["Arn"]
        resource = PhysicalResource(name, {"Arn": arn})
        site.begin(resource)
        for role in desired["Roles"]:
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        iam = site.client("iam")
        for role in iam.get_instance_profile(InstanceProfileName=resource.id)["InstanceProfile"]["Roles"]:
            iam.remove_role_from_instance_profile(InstanceProfileName=resource.id, RoleName=role["RoleName"])
        iam.delete_instance_profile(InstanceProfileName=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        instance_profile: Mapping[str, Any] = site.client("iam").get_instance_profile(InstanceProfileName=resource.id)[
            "InstanceProfile"
        ]
        return {**instance_profile, "Roles": [role["RoleName"] for role in instance_profile["Roles"]]}


@provides
class OidcProvider(Provider):
    type = "AWS::IAM::OIDCProvider"
    properties = frozenset({"ClientIdList", "Tags", "ThumbprintList", "Url"})
    fixed = frozenset({"Url"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        arn = site.client("iam").create_open_id_connect_provider(
            Url=desired["Url"],
            ClientIDList=desired.get("ClientIdList", []),
            ThumbprintList=desired.get("ThumbprintList", []),
            Tags=tags(desired),
        )["OpenIDConnectProviderArn"]
        return PhysicalResource(arn, {"Arn": arn})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("iam").delete_open_id_connect_provider(OpenIDConnectProviderArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("iam").get_open_id_connect_provider(OpenIDConnectProviderArn=resource.id)
        return {**response, "Url": f"https://{response['Url']}"}
