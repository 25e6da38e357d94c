"""Security groups, with inline rules and rules as resources.

EC2 keeps all rules of a group in one list. The inline rules are recognised by their ids.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.providers.network import retag, specified

_ANYWHERE: Final = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}  # the default egress of a new group
_ENDS: Final = ("CidrIp", "CidrIpv6", "SourceSecurityGroupId", "SourcePrefixListId")
_ENDS_OUT: Final = ("CidrIp", "CidrIpv6", "DestinationSecurityGroupId", "DestinationPrefixListId")


class Direction:
    """Ingress or egress: the same calls with different names."""

    def __init__(self, name: str, end: str) -> None:
        self.name, self.end = name, end

    def authorise(self, ec2: Any, group: str, rule: Properties) -> str:
        call = getattr(ec2, f"authorize_security_group_{self.name}")
        result = call(GroupId=group, IpPermissions=[permission(rule, self.end)])
        id_: str = result["SecurityGroupRules"][0]["SecurityGroupRuleId"]
        return id_

    def revoke(self, ec2: Any, group: str, id_: str) -> None:
        getattr(ec2, f"revoke_security_group_{self.name}")(GroupId=group, SecurityGroupRuleIds=[id_])

    def declaration(self, rule: Mapping[str, Any]) -> dict[str, Any]:
        """A rule of a description in the form of a template."""
        names = {"CidrIpv4": "CidrIp", "CidrIpv6": "CidrIpv6", "PrefixListId": f"{self.end}PrefixListId"}
        result = {ours: rule[theirs] for theirs, ours in names.items() if rule.get(theirs)}
        if group := rule.get("ReferencedGroupInfo", {}).get("GroupId"):
            result[f"{self.end}SecurityGroupId"] = group
        plain = {name: rule[name] for name in ("IpProtocol", "FromPort", "ToPort", "Description") if name in rule}
        return {**plain, **result}


IN: Final = Direction("ingress", "Source")
OUT: Final = Direction("egress", "Destination")


def permission(rule: Properties, end: str) -> dict[str, Any]:
    """A rule as the argument of a call."""
    document: dict[str, Any] = {"IpProtocol": str(rule["IpProtocol"])}
    if document["IpProtocol"] != "-1":
        document |= {name: int(rule[name]) for name in ("FromPort", "ToPort") if name in rule}
    description = {"Description": rule["Description"]} if "Description" in rule else {}
    for name, part, member in (
        ("CidrIp", "IpRanges", "CidrIp"),
        ("CidrIpv6", "Ipv6Ranges", "CidrIpv6"),
        (f"{end}PrefixListId", "PrefixListIds", "PrefixListId"),
        (f"{end}SecurityGroupId", "UserIdGroupPairs", "GroupId"),
    ):
        if name in rule:
            document[part] = [{member: rule[name], **description}]
    return document


def rules_of(ec2: Any, group: str, out: bool) -> dict[str, Mapping[str, Any]]:
    security_group_rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])[
        "SecurityGroupRules"
    ]
    return {rule["SecurityGroupRuleId"]: rule for rule in security_group_rules if rule["IsEgress"] == out}


@provides
class SecurityGroup(Provider):
    type = "AWS::EC2::SecurityGroup"
    properties = frozenset(
        {"GroupDescription", "GroupName", "SecurityGroupEgress", "SecurityGroupIngress", "Tags", "VpcId"}
    )
    fixed = frozenset({"GroupDescription", "GroupName", "VpcId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        id_ = ec2.create_security_group(
            GroupName=desired.get("GroupName") or site.name(255),
            Description=desired["GroupDescription"],
            VpcId=desired["VpcId"],
            **specified("security-group", desired),
        )["GroupId"]
        attributes = {"GroupId": id_, "Id": id_}
        state = {"in": [], "out": [(rule, _ANYWHERE) for rule in rules_of(ec2, id_, out=True)]}
        site.begin(PhysicalResource(id_, attributes, state=state))
        return PhysicalResource(id_, attributes, state=_replace_rules(ec2, id_, state, desired))

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ec2 = site.client("ec2")
        retag(ec2, resource.id, before, desired)
        return PhysicalResource(
            resource.id, resource.attributes, state=_replace_rules(ec2, resource.id, resource.state, desired)
        )

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").delete_security_group(GroupId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        """The group with its inline rules only; other rules are resources of their own."""
        ec2 = site.client("ec2")
        security_group = ec2.describe_security_groups(GroupIds=[resource.id])["SecurityGroups"][0]
        actual = {**security_group, "GroupDescription": security_group["Description"]}
        for direction, name, part in ((IN, "in", "SecurityGroupIngress"), (OUT, "out", "SecurityGroupEgress")):
            rules = rules_of(ec2, resource.id, out=direction is OUT)
            actual[part] = [direction.declaration(rules[id_]) for id_, _ in resource.state[name] if id_ in rules]
        return actual


def _replace_rules(ec2: Any, group: str, state: Mapping[str, Any], desired: Properties) -> dict[str, Any]:
    """Replace the group's inline rules and return them with their ids. A group without egress rules in its template
    permits all egress, as EC2 creates it."""
    document: dict[str, Any] = {}
    for direction, name, rules in (
        (IN, "in", desired.get("SecurityGroupIngress", [])),
        (OUT, "out", desired.get("SecurityGroupEgress") or [_ANYWHERE]),
    ):
        unchanged = [(id_, rule) for id_, rule in state[name] if rule in rules]
        for id_, rule in state[name]:
            if rule not in rules:
                direction.revoke(ec2, group, id_)
        current = [rule for _, rule in unchanged]
        added = [(direction.authorise(ec2, group, rule), rule) for rule in rules if rule not in current]
        document[name] = [*unchanged, *added]
    return document


class _StandaloneRule(Provider):
    """A rule as a resource, for a group that would otherwise refer to itself."""

    direction: ClassVar[Direction]

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        id_ = self.direction.authorise(site.client("ec2"), desired["GroupId"], desired)
        return PhysicalResource(id_, {"Id": id_}, state={"GroupId": desired["GroupId"]})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        call = getattr(site.client("ec2"), f"update_security_group_rule_descriptions_{self.direction.name}")
        description = {"SecurityGroupRuleId": resource.id, "Description": desired.get("Description", "")}
        call(GroupId=desired["GroupId"], SecurityGroupRuleDescriptions=[description])
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        self.direction.revoke(site.client("ec2"), properties["GroupId"], resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        group = resource.state["GroupId"]
        rule = rules_of(site.client("ec2"), group, out=self.direction is OUT)[resource.id]
        return {"GroupId": group, **self.direction.declaration(rule)}


@provides
class Ingress(_StandaloneRule):
    type = "AWS::EC2::SecurityGroupIngress"
    properties = frozenset({"Description", "FromPort", "GroupId", "IpProtocol", "ToPort", *_ENDS})
    fixed = properties - {"Description"}
    direction = IN


@provides
class Egress(_StandaloneRule):
    type = "AWS::EC2::SecurityGroupEgress"
    properties = frozenset({"Description", "FromPort", "GroupId", "IpProtocol", "ToPort", *_ENDS_OUT})
    fixed = properties - {"Description"}
    direction = OUT
