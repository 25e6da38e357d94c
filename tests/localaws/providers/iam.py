"""Roles, policies, profiles, and GitHub's word."""

import json
from collections.abc import Mapping
from typing import Any

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
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

    def create(self, wanted: Properties, at: Site) -> Made:
        iam, name = at.client("iam"), wanted.get("RoleName") or at.name(64)
        given = {key: wanted[key] for key in ("Path", "Description", "PermissionsBoundary") if key in wanted}
        if "MaxSessionDuration" in wanted:
            given["MaxSessionDuration"] = int(wanted["MaxSessionDuration"])
        told = iam.create_role(
            RoleName=name,
            AssumeRolePolicyDocument=json.dumps(wanted["AssumeRolePolicyDocument"]),
            Tags=tags(wanted),
            **given,
        )["Role"]
        made = Made(name, {"Arn": told["Arn"], "RoleId": told["RoleId"]})
        at.begin(made)
        self._policies(iam, name, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        iam = at.client("iam")
        iam.update_assume_role_policy(RoleName=made.id, PolicyDocument=json.dumps(wanted["AssumeRolePolicyDocument"]))
        given = {"Description": wanted.get("Description", "")}
        iam.update_role(RoleName=made.id, MaxSessionDuration=int(wanted.get("MaxSessionDuration", 3600)), **given)
        if before.get("PermissionsBoundary") != wanted.get("PermissionsBoundary"):
            if "PermissionsBoundary" in wanted:
                iam.put_role_permissions_boundary(RoleName=made.id, PermissionsBoundary=wanted["PermissionsBoundary"])
            else:
                iam.delete_role_permissions_boundary(RoleName=made.id)
        self._policies(iam, made.id, before, wanted)
        if gone := [tag["Key"] for tag in tags(before) if tag["Key"] not in {each["Key"] for each in tags(wanted)}]:
            iam.untag_role(RoleName=made.id, TagKeys=gone)
        iam.tag_role(RoleName=made.id, Tags=tags(wanted))
        return made

    def _policies(self, iam: Any, name: str, before: Properties, wanted: Properties) -> None:
        old, new = (set(each.get("ManagedPolicyArns", ())) for each in (before, wanted))
        for arn in sorted(old - new):
            iam.detach_role_policy(RoleName=name, PolicyArn=arn)
        for arn in sorted(new - old):
            iam.attach_role_policy(RoleName=name, PolicyArn=arn)
        inline = {one["PolicyName"]: one["PolicyDocument"] for one in wanted.get("Policies", ())}
        for gone in {one["PolicyName"] for one in before.get("Policies", ())} - inline.keys():
            iam.delete_role_policy(RoleName=name, PolicyName=gone)
        for policy, document in inline.items():
            iam.put_role_policy(RoleName=name, PolicyName=policy, PolicyDocument=json.dumps(document))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        iam = at.client("iam")
        for one in iam.list_attached_role_policies(RoleName=made.id)["AttachedPolicies"]:
            iam.detach_role_policy(RoleName=made.id, PolicyArn=one["PolicyArn"])
        for name in iam.list_role_policies(RoleName=made.id)["PolicyNames"]:
            iam.delete_role_policy(RoleName=made.id, PolicyName=name)
        iam.delete_role(RoleName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        iam = at.client("iam")
        told = iam.get_role(RoleName=made.id)["Role"]
        names = iam.list_role_policies(RoleName=made.id)["PolicyNames"]
        attached = iam.list_attached_role_policies(RoleName=made.id)["AttachedPolicies"]
        return {
            **told,
            "ManagedPolicyArns": [one["PolicyArn"] for one in attached],
            "PermissionsBoundary": told.get("PermissionsBoundary", {}).get("PermissionsBoundaryArn"),
            "Policies": [
                {
                    "PolicyName": name,
                    "PolicyDocument": iam.get_role_policy(RoleName=made.id, PolicyName=name)["PolicyDocument"],
                }
                for name in names
            ],
            "Tags": iam.list_role_tags(RoleName=made.id)["Tags"],
        }


@provides
class Policy(Provider):
    """An inline policy, on each of the roles that it names."""

    type = "AWS::IAM::Policy"
    properties = frozenset({"PolicyDocument", "PolicyName", "Roles"})
    fixed = frozenset({"PolicyName"})

    def create(self, wanted: Properties, at: Site) -> Made:
        for role in wanted["Roles"]:
            at.client("iam").put_role_policy(
                RoleName=role, PolicyName=wanted["PolicyName"], PolicyDocument=json.dumps(wanted["PolicyDocument"])
            )
        return Made(
            at.name(64), {"Id": wanted["PolicyName"], "PolicyName": wanted["PolicyName"], "Roles": wanted["Roles"]}
        )

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        for role in set(before["Roles"]) - set(wanted["Roles"]):
            at.client("iam").delete_role_policy(RoleName=role, PolicyName=wanted["PolicyName"])
        changed = self.create(wanted, at)
        return Made(made.id, changed.attributes)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        iam = at.client("iam")
        for role in properties["Roles"]:
            iam.delete_role_policy(RoleName=role, PolicyName=properties["PolicyName"])

    def read(self, made: Made, at: Site) -> Properties:
        iam, name = at.client("iam"), made.attributes["PolicyName"]
        documents = [
            iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"] for role in made.attributes["Roles"]
        ]
        return {"PolicyName": name, "Roles": made.attributes["Roles"], "PolicyDocument": documents[0]}


@provides
class ManagedPolicy(Provider):
    type = "AWS::IAM::ManagedPolicy"
    properties = frozenset({"Description", "ManagedPolicyName", "Path", "PolicyDocument", "Roles"})
    fixed = frozenset({"Description", "ManagedPolicyName", "Path"})

    def create(self, wanted: Properties, at: Site) -> Made:
        iam = at.client("iam")
        given = {key: wanted[key] for key in ("Description", "Path") if key in wanted}
        arn = iam.create_policy(
            PolicyName=wanted.get("ManagedPolicyName") or at.name(128),
            PolicyDocument=json.dumps(wanted["PolicyDocument"]),
            **given,
        )["Policy"]["Arn"]
        made = Made(arn, {"PolicyArn": arn})
        at.begin(made)
        self._attach(iam, arn, set(), set(wanted.get("Roles", ())))
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        iam = at.client("iam")
        if before["PolicyDocument"] != wanted["PolicyDocument"]:
            old = [
                one for one in iam.list_policy_versions(PolicyArn=made.id)["Versions"] if not one["IsDefaultVersion"]
            ]
            if len(old) >= 4:  # AWS keeps five
                iam.delete_policy_version(PolicyArn=made.id, VersionId=old[-1]["VersionId"])
            document = json.dumps(wanted["PolicyDocument"])
            iam.create_policy_version(PolicyArn=made.id, PolicyDocument=document, SetAsDefault=True)
        self._attach(iam, made.id, set(before.get("Roles", ())), set(wanted.get("Roles", ())))
        return made

    def _attach(self, iam: Any, arn: str, before: set[str], wanted: set[str]) -> None:
        for role in sorted(before - wanted):
            iam.detach_role_policy(RoleName=role, PolicyArn=arn)
        for role in sorted(wanted - before):
            iam.attach_role_policy(RoleName=role, PolicyArn=arn)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        iam = at.client("iam")
        for one in iam.list_entities_for_policy(PolicyArn=made.id)["PolicyRoles"]:
            iam.detach_role_policy(RoleName=one["RoleName"], PolicyArn=made.id)
        for one in iam.list_policy_versions(PolicyArn=made.id)["Versions"]:
            if not one["IsDefaultVersion"]:
                iam.delete_policy_version(PolicyArn=made.id, VersionId=one["VersionId"])
        iam.delete_policy(PolicyArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        iam = at.client("iam")
        told = iam.get_policy(PolicyArn=made.id)["Policy"]
        version = iam.get_policy_version(PolicyArn=made.id, VersionId=told["DefaultVersionId"])["PolicyVersion"]
        roles = iam.list_entities_for_policy(PolicyArn=made.id)["PolicyRoles"]
        return {
            **told,
            "ManagedPolicyName": told["PolicyName"],
            "PolicyDocument": version["Document"],
            "Roles": [one["RoleName"] for one in roles],
        }


@provides
class InstanceProfile(Provider):
    type = "AWS::IAM::InstanceProfile"
    properties = frozenset({"InstanceProfileName", "Path", "Roles"})
    fixed = frozenset({"InstanceProfileName", "Path"})

    def create(self, wanted: Properties, at: Site) -> Made:
        iam, name = at.client("iam"), wanted.get("InstanceProfileName") or at.name(128)
        given = {"Path": wanted["Path"]} if "Path" in wanted else {}
        arn = iam.create_instance_profile(InstanceProfileName=name, **given)["InstanceProfile"]["Arn"]
        made = Made(name, {"Arn": arn})
        at.begin(made)
        for role in wanted["Roles"]:
            iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=role)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        iam = at.client("iam")
        for role in iam.get_instance_profile(InstanceProfileName=made.id)["InstanceProfile"]["Roles"]:
            iam.remove_role_from_instance_profile(InstanceProfileName=made.id, RoleName=role["RoleName"])
        iam.delete_instance_profile(InstanceProfileName=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told: Mapping[str, Any] = at.client("iam").get_instance_profile(InstanceProfileName=made.id)["InstanceProfile"]
        return {**told, "Roles": [role["RoleName"] for role in told["Roles"]]}


@provides
class OidcProvider(Provider):
    type = "AWS::IAM::OIDCProvider"
    properties = frozenset({"ClientIdList", "Tags", "ThumbprintList", "Url"})
    fixed = frozenset({"Url"})

    def create(self, wanted: Properties, at: Site) -> Made:
        arn = at.client("iam").create_open_id_connect_provider(
            Url=wanted["Url"],
            ClientIDList=wanted.get("ClientIdList", []),
            ThumbprintList=wanted.get("ThumbprintList", []),
            Tags=tags(wanted),
        )["OpenIDConnectProviderArn"]
        return Made(arn, {"Arn": arn})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("iam").delete_open_id_connect_provider(OpenIDConnectProviderArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("iam").get_open_id_connect_provider(OpenIDConnectProviderArn=made.id)
        return {**told, "Url": f"https://{told['Url']}"}
