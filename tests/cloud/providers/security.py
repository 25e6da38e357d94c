"""Security groups, with the rules inside of them and beside them."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tests.cloud.formation.provider import Made, Properties, Provider, Site, provides
from tests.cloud.providers.network import retag, specified

_ANYWHERE: Final = {"IpProtocol": "-1", "CidrIp": "0.0.0.0/0"}  # what a new group lets out if nothing is said of it
_ENDS: Final = ("CidrIp", "CidrIpv6", "SourceSecurityGroupId", "DestinationSecurityGroupId", "DestinationPrefixListId")


def permission(rule: Mapping[str, Any]) -> dict[str, Any]:
    """One rule as a call takes it."""
    found: dict[str, Any] = {"IpProtocol": str(rule["IpProtocol"])}
    if found["IpProtocol"] != "-1":
        found |= {name: int(rule[name]) for name in ("FromPort", "ToPort") if name in rule}
    word = {"Description": rule["Description"]} if "Description" in rule else {}
    group = rule.get("SourceSecurityGroupId") or rule.get("DestinationSecurityGroupId")
    if "CidrIp" in rule:
        found["IpRanges"] = [{"CidrIp": rule["CidrIp"], **word}]
    elif "CidrIpv6" in rule:
        found["Ipv6Ranges"] = [{"CidrIpv6": rule["CidrIpv6"], **word}]
    elif "DestinationPrefixListId" in rule:
        found["PrefixListIds"] = [{"PrefixListId": rule["DestinationPrefixListId"], **word}]
    else:
        found["UserIdGroupPairs"] = [{"GroupId": group, **word}]
    return found


def told_rules(permissions: Iterable[Mapping[str, Any]], group: str) -> list[dict[str, Any]]:
    """What a description tells, a rule for each end; `group` is what the template calls a group at the other end."""
    rules = []
    for one in permissions:
        plain = {name: one[name] for name in ("IpProtocol", "FromPort", "ToPort") if one.get(name) is not None}
        for part, theirs, ours in (
            ("IpRanges", "CidrIp", "CidrIp"),
            ("Ipv6Ranges", "CidrIpv6", "CidrIpv6"),
            ("PrefixListIds", "PrefixListId", "DestinationPrefixListId"),
            ("UserIdGroupPairs", "GroupId", group),
        ):
            for end in one.get(part, ()):
                word = {"Description": end["Description"]} if end.get("Description") else {}
                rules.append({**plain, ours: end[theirs], **word})
    return rules


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
        made = Made(id_, {"GroupId": id_, "Id": id_, "VpcId": wanted["VpcId"]})
        at.begin(made)
        self._set_rules(ec2, id_, {}, wanted)
        return made

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        self._set_rules(ec2, made.id, before, wanted)
        retag(ec2, made.id, before, wanted)
        return made

    def _set_rules(self, ec2: Any, id_: str, before: Properties, wanted: Properties) -> None:
        """A group whose template says nothing of what goes out lets everything out, as EC2 made it."""
        old, new = (each.get("SecurityGroupIngress", []) for each in (before, wanted))
        _exchange(old, new, id_, ec2.revoke_security_group_ingress, ec2.authorize_security_group_ingress)
        old, new = (each.get("SecurityGroupEgress") or [_ANYWHERE] for each in (before, wanted))
        _exchange(old, new, id_, ec2.revoke_security_group_egress, ec2.authorize_security_group_egress)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").delete_security_group(GroupId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        """With the rules of the group's own template only: those beside it are resources of their own."""
        told = at.client("ec2").describe_security_groups(GroupIds=[made.id])["SecurityGroups"][0]
        return {
            **told,
            "GroupDescription": told["Description"],
            "SecurityGroupIngress": told_rules(told["IpPermissions"], "SourceSecurityGroupId"),
            "SecurityGroupEgress": told_rules(told["IpPermissionsEgress"], "DestinationSecurityGroupId"),
        }


def _exchange(old: list[Any], new: list[Any], id_: str, revoke: Any, authorise: Any) -> None:
    def plain(rules: list[Any]) -> list[Any]:
        return [permission(rule) for rule in rules]

    before, after = plain(old), plain(new)
    if gone := [one for one in before if one not in after]:
        revoke(GroupId=id_, IpPermissions=gone)
    if come := [one for one in after if one not in before]:
        authorise(GroupId=id_, IpPermissions=come)


class _Beside(Provider):
    """A rule that is a resource of its own: of a group that would otherwise refer to itself."""

    properties = frozenset({"Description", "FromPort", "GroupId", "IpProtocol", "ToPort", *_ENDS})
    fixed = properties - {"Description"}
    way: str
    group: str

    def create(self, wanted: Properties, at: Site) -> Made:
        call = getattr(at.client("ec2"), f"authorize_security_group_{self.way}")
        told = call(GroupId=wanted["GroupId"], IpPermissions=[permission(wanted)])
        rules = told.get("SecurityGroupRules") or [{}]
        id_ = rules[0].get("SecurityGroupRuleId") or at.name(40)
        return Made(id_, {"Id": id_, "wanted": dict(wanted)})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        self.delete(made, before, at)
        return self.create(wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        call = getattr(at.client("ec2"), f"revoke_security_group_{self.way}")
        call(GroupId=properties["GroupId"], IpPermissions=[permission(properties)])

    def read(self, made: Made, at: Site) -> Properties:
        wanted = made.attributes["wanted"]
        told = at.client("ec2").describe_security_groups(GroupIds=[wanted["GroupId"]])["SecurityGroups"][0]
        part = "IpPermissions" if self.way == "ingress" else "IpPermissionsEgress"
        rules = [{"GroupId": wanted["GroupId"], **rule} for rule in told_rules(told[part], self.group)]
        end = next(name for name in _ENDS if name in wanted)
        return next((rule for rule in rules if rule.get(end) == wanted[end] and _same_ports(rule, wanted)), {})


def _same_ports(rule: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    names = ("IpProtocol", "FromPort", "ToPort")
    return rule["IpProtocol"] == "-1" or all(str(rule.get(name)) == str(wanted.get(name)) for name in names)


@provides
class Ingress(_Beside):
    type = "AWS::EC2::SecurityGroupIngress"
    way, group = "ingress", "SourceSecurityGroupId"


@provides
class Egress(_Beside):
    type = "AWS::EC2::SecurityGroupEgress"
    way, group = "egress", "DestinationSecurityGroupId"
