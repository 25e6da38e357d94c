"""Security groups, with the rules inside of them and beside them.

EC2 keeps all rules of a group in one list. Which of them are the group's own is known by their ids alone.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.providers.network import retag, specified

_ANYWHERE: Final = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}  # what a new group lets out if nothing is said of it
_ENDS: Final = ("CidrIp", "CidrIpv6", "SourceSecurityGroupId", "SourcePrefixListId")
_ENDS_OUT: Final = ("CidrIp", "CidrIpv6", "DestinationSecurityGroupId", "DestinationPrefixListId")


class Way:
    """In or out: the same calls by another name."""

    def __init__(self, name: str, end: str) -> None:
        self.name, self.end = name, end

    def authorise(self, ec2: Any, group: str, rule: Properties) -> str:
        call = getattr(ec2, f"authorize_security_group_{self.name}")
        told = call(GroupId=group, IpPermissions=[permission(rule, self.end)])
        id_: str = told["SecurityGroupRules"][0]["SecurityGroupRuleId"]
        return id_

    def revoke(self, ec2: Any, group: str, id_: str) -> None:
        getattr(ec2, f"revoke_security_group_{self.name}")(GroupId=group, SecurityGroupRuleIds=[id_])

    def told(self, rule: Mapping[str, Any]) -> dict[str, Any]:
        """A rule of a description as templates have it."""
        names = {"CidrIpv4": "CidrIp", "CidrIpv6": "CidrIpv6", "PrefixListId": f"{self.end}PrefixListId"}
        found = {ours: rule[theirs] for theirs, ours in names.items() if rule.get(theirs)}
        if group := rule.get("ReferencedGroupInfo", {}).get("GroupId"):
            found[f"{self.end}SecurityGroupId"] = group
        plain = {name: rule[name] for name in ("IpProtocol", "FromPort", "ToPort", "Description") if name in rule}
        return {**plain, **found}


IN: Final = Way("ingress", "Source")
OUT: Final = Way("egress", "Destination")


def permission(rule: Properties, end: str) -> dict[str, Any]:
    """One rule as a call takes it."""
    found: dict[str, Any] = {"IpProtocol": str(rule["IpProtocol"])}
    if found["IpProtocol"] != "-1":
        found |= {name: int(rule[name]) for name in ("FromPort", "ToPort") if name in rule}
    word = {"Description": rule["Description"]} if "Description" in rule else {}
    for name, part, member in (
        ("CidrIp", "IpRanges", "CidrIp"),
        ("CidrIpv6", "Ipv6Ranges", "CidrIpv6"),
        (f"{end}PrefixListId", "PrefixListIds", "PrefixListId"),
        (f"{end}SecurityGroupId", "UserIdGroupPairs", "GroupId"),
    ):
        if name in rule:
            found[part] = [{member: rule[name], **word}]
    return found


def rules_of(ec2: Any, group: str, out: bool) -> dict[str, Mapping[str, Any]]:
    told = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])["SecurityGroupRules"]
    return {rule["SecurityGroupRuleId"]: rule for rule in told if rule["IsEgress"] == out}


@provides
class SecurityGroup(Provider):
    type = "AWS::EC2::SecurityGroup"
    properties = frozenset(
        {"GroupDescription", "GroupName", "SecurityGroupEgress", "SecurityGroupIngress", "Tags", "VpcId"}
    )
    fixed = frozenset({"GroupDescription", "GroupName", "VpcId"})

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        id_ = ec2.create_security_group(
            GroupName=wanted.get("GroupName") or at.name(255),
            Description=wanted["GroupDescription"],
            VpcId=wanted["VpcId"],
            **specified("security-group", wanted),
        )["GroupId"]
        attributes = {"GroupId": id_, "Id": id_}
        kept = {"in": [], "out": [(rule, _ANYWHERE) for rule in rules_of(ec2, id_, out=True)]}
        at.begin(Made(id_, attributes, kept=kept))
        return Made(id_, attributes, kept=_exchanged(ec2, id_, kept, wanted))

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        retag(ec2, made.id, before, wanted)
        return Made(made.id, made.attributes, kept=_exchanged(ec2, made.id, made.kept, wanted))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").delete_security_group(GroupId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        """With the rules of the group's own template only: those beside it are resources of their own."""
        ec2 = at.client("ec2")
        told = ec2.describe_security_groups(GroupIds=[made.id])["SecurityGroups"][0]
        found = {**told, "GroupDescription": told["Description"]}
        for way, name, part in ((IN, "in", "SecurityGroupIngress"), (OUT, "out", "SecurityGroupEgress")):
            rules = rules_of(ec2, made.id, out=way is OUT)
            found[part] = [way.told(rules[id_]) for id_, _ in made.kept[name] if id_ in rules]
        return found


def _exchanged(ec2: Any, group: str, kept: Mapping[str, Any], wanted: Properties) -> dict[str, Any]:
    """The group's own rules, by their ids, after those that are not wanted any more made room for the new ones. A
    group whose template says nothing of what goes out lets everything out, as EC2 made it."""
    found: dict[str, Any] = {}
    for way, name, rules in (
        (IN, "in", wanted.get("SecurityGroupIngress", [])),
        (OUT, "out", wanted.get("SecurityGroupEgress") or [_ANYWHERE]),
    ):
        stay = [(id_, rule) for id_, rule in kept[name] if rule in rules]
        for id_, rule in kept[name]:
            if rule not in rules:
                way.revoke(ec2, group, id_)
        there = [rule for _, rule in stay]
        come = [(way.authorise(ec2, group, rule), rule) for rule in rules if rule not in there]
        found[name] = [*stay, *come]
    return found


class _Beside(Provider):
    """A rule that is a resource of its own: of a group that would otherwise refer to itself."""

    way: ClassVar[Way]

    def create(self, wanted: Properties, at: Site) -> Made:
        id_ = self.way.authorise(at.client("ec2"), wanted["GroupId"], wanted)
        return Made(id_, {"Id": id_}, kept={"GroupId": wanted["GroupId"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        call = getattr(at.client("ec2"), f"update_security_group_rule_descriptions_{self.way.name}")
        word = {"SecurityGroupRuleId": made.id, "Description": wanted.get("Description", "")}
        call(GroupId=wanted["GroupId"], SecurityGroupRuleDescriptions=[word])
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        self.way.revoke(at.client("ec2"), properties["GroupId"], made.id)

    def read(self, made: Made, at: Site) -> Properties:
        group = made.kept["GroupId"]
        rule = rules_of(at.client("ec2"), group, out=self.way is OUT)[made.id]
        return {"GroupId": group, **self.way.told(rule)}


@provides
class Ingress(_Beside):
    type = "AWS::EC2::SecurityGroupIngress"
    properties = frozenset({"Description", "FromPort", "GroupId", "IpProtocol", "ToPort", *_ENDS})
    fixed = properties - {"Description"}
    way = IN


@provides
class Egress(_Beside):
    type = "AWS::EC2::SecurityGroupEgress"
    properties = frozenset({"Description", "FromPort", "GroupId", "IpProtocol", "ToPort", *_ENDS_OUT})
    fixed = properties - {"Description"}
    way = OUT
