"""Load balancers, their listeners and rules, and the groups of targets that they send to."""

from typing import Any, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags

_NAME: Final = 32


def _name(wanted: Properties, at: Site) -> str:
    """Names here are short, and have no two hyphens in a row."""
    found: str = wanted.get("Name") or at.name(_NAME).replace("--", "-")
    return found


def _retag(elb: Any, arn: str, before: Properties, wanted: Properties) -> None:
    kept = {tag["Key"] for tag in tags(wanted)}
    if gone := [tag["Key"] for tag in tags(before) if tag["Key"] not in kept]:
        elb.remove_tags(ResourceArns=[arn], TagKeys=gone)
    if tags(wanted):
        elb.add_tags(ResourceArns=[arn], Tags=tags(wanted))


def _told_tags(elb: Any, arn: str) -> dict[str, Any]:
    return {"Tags": elb.describe_tags(ResourceArns=[arn])["TagDescriptions"][0]["Tags"]}


def _asked(wanted: Properties, name: str) -> dict[str, Any]:
    """The keys of the attributes that a template names: a service tells all that it has."""
    return {"keys": [one["Key"] for one in wanted.get(name, [])]}


def _told(made: Made, attributes: list[Any]) -> list[Any]:
    return [one for one in attributes if one["Key"] in made.kept["keys"]]


def _with_labels(wanted: Properties) -> dict[str, Any]:
    """The service refuses an empty list of tags."""
    return {name: value for name, value in wanted.items() if name != "Tags" or value}


@provides
class LoadBalancer(Provider):
    type = "AWS::ElasticLoadBalancingV2::LoadBalancer"
    properties = frozenset(
        {"IpAddressType", "LoadBalancerAttributes", "Name", "Scheme", "SecurityGroups", "Subnets", "Tags", "Type"}
    )
    fixed = frozenset({"Name", "Scheme", "Type"})

    def create(self, wanted: Properties, at: Site) -> Made:
        elb = at.client("elbv2")
        given = {"Scheme": "internet-facing", **_with_labels(wanted), "Name": _name(wanted, at)}
        call = shaped(elb, "create_load_balancer", given, but=frozenset({"LoadBalancerAttributes"}))
        told = elb.create_load_balancer(**call)["LoadBalancers"][0]
        made = self._made(told, wanted)
        at.begin(made)
        self._set(elb, made, wanted)
        return made

    def _made(self, told: Any, wanted: Properties) -> Made:
        arn = told["LoadBalancerArn"]
        return Made(
            arn,
            {
                "CanonicalHostedZoneID": told["CanonicalHostedZoneId"],
                "DNSName": told["DNSName"],
                "LoadBalancerArn": arn,
                "LoadBalancerFullName": arn.split("loadbalancer/", 1)[1],
                "LoadBalancerName": told["LoadBalancerName"],
                "SecurityGroups": told.get("SecurityGroups", []),
            },
            _asked(wanted, "LoadBalancerAttributes"),
        )

    def _set(self, elb: Any, made: Made, wanted: Properties) -> None:
        if given := wanted.get("LoadBalancerAttributes"):
            call = shaped(elb, "modify_load_balancer_attributes", {"LoadBalancerArn": made.id, "Attributes": given})
            elb.modify_load_balancer_attributes(**call)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        elb, arn = at.client("elbv2"), made.id
        if before.get("SecurityGroups") != wanted.get("SecurityGroups"):
            elb.set_security_groups(LoadBalancerArn=arn, SecurityGroups=wanted["SecurityGroups"])
        if before["Subnets"] != wanted["Subnets"]:
            elb.set_subnets(LoadBalancerArn=arn, Subnets=wanted["Subnets"])
        if before.get("IpAddressType") != wanted.get("IpAddressType"):
            elb.set_ip_address_type(LoadBalancerArn=arn, IpAddressType=wanted.get("IpAddressType", "ipv4"))
        self._set(elb, made, wanted)
        _retag(elb, arn, before, wanted)
        return self._made(elb.describe_load_balancers(LoadBalancerArns=[arn])["LoadBalancers"][0], wanted)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("elbv2").delete_load_balancer(LoadBalancerArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        elb = at.client("elbv2")
        told = elb.describe_load_balancers(LoadBalancerArns=[made.id])["LoadBalancers"][0]
        wanted = elb.describe_load_balancer_attributes(LoadBalancerArn=made.id)["Attributes"]
        return {
            **told,
            "Name": told["LoadBalancerName"],
            "LoadBalancerAttributes": _told(made, wanted),
            "Subnets": [zone["SubnetId"] for zone in told["AvailabilityZones"]],
            **_told_tags(elb, made.id),
        }


@provides
class TargetGroup(Provider):
    type = "AWS::ElasticLoadBalancingV2::TargetGroup"
    _HEALTH: Final = (
        "HealthCheckEnabled",
        "HealthCheckIntervalSeconds",
        "HealthCheckPath",
        "HealthCheckPort",
        "HealthCheckProtocol",
        "HealthCheckTimeoutSeconds",
        "HealthyThresholdCount",
        "Matcher",
        "UnhealthyThresholdCount",
    )
    fixed = frozenset({"IpAddressType", "Name", "Port", "Protocol", "ProtocolVersion", "TargetType", "VpcId"})
    properties = fixed | {*_HEALTH, "Tags", "TargetGroupAttributes", "Targets"}

    def create(self, wanted: Properties, at: Site) -> Made:
        elb, beside = at.client("elbv2"), frozenset({"TargetGroupAttributes", "Targets"})
        given = {**_with_labels(wanted), "Name": _name(wanted, at)}
        told = elb.create_target_group(**shaped(elb, "create_target_group", given, but=beside))["TargetGroups"][0]
        made = self._made(told, wanted)
        at.begin(made)
        if wanted.get("HealthCheckEnabled") is not None:
            self._check(elb, made.id, {"HealthCheckEnabled": wanted["HealthCheckEnabled"]})
        self._set(elb, made.id, {}, wanted)
        return made

    def _made(self, told: Any, wanted: Properties) -> Made:
        arn = told["TargetGroupArn"]
        return Made(
            arn,
            {
                "LoadBalancerArns": told.get("LoadBalancerArns", []),
                "TargetGroupArn": arn,
                "TargetGroupFullName": arn.rsplit(":", 1)[1],
                "TargetGroupName": told["TargetGroupName"],
            },
            _asked(wanted, "TargetGroupAttributes"),
        )

    def _check(self, elb: Any, arn: str, given: Properties) -> None:
        elb.modify_target_group(**shaped(elb, "modify_target_group", {"TargetGroupArn": arn, **given}))

    def _set(self, elb: Any, arn: str, before: Properties, wanted: Properties) -> None:
        if given := wanted.get("TargetGroupAttributes"):
            call = shaped(elb, "modify_target_group_attributes", {"TargetGroupArn": arn, "Attributes": given})
            elb.modify_target_group_attributes(**call)
        old, new = before.get("Targets", []), wanted.get("Targets", [])
        if gone := [one for one in old if one not in new]:
            elb.deregister_targets(**shaped(elb, "deregister_targets", {"TargetGroupArn": arn, "Targets": gone}))
        if come := [one for one in new if one not in old]:
            elb.register_targets(**shaped(elb, "register_targets", {"TargetGroupArn": arn, "Targets": come}))

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        elb = at.client("elbv2")
        if given := {name: wanted[name] for name in self._HEALTH if wanted.get(name, ...) != before.get(name, ...)}:
            self._check(elb, made.id, given)
        self._set(elb, made.id, before, wanted)
        _retag(elb, made.id, before, wanted)
        return self._made(elb.describe_target_groups(TargetGroupArns=[made.id])["TargetGroups"][0], wanted)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("elbv2").delete_target_group(TargetGroupArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        elb = at.client("elbv2")
        told = elb.describe_target_groups(TargetGroupArns=[made.id])["TargetGroups"][0]
        there = elb.describe_target_health(TargetGroupArn=made.id)["TargetHealthDescriptions"]
        wanted = elb.describe_target_group_attributes(TargetGroupArn=made.id)["Attributes"]
        return {
            **told,
            "Name": told["TargetGroupName"],
            "TargetGroupAttributes": _told(made, wanted),
            "Targets": [one["Target"] for one in there],
            **_told_tags(elb, made.id),
        }


@provides
class Listener(Provider):
    type = "AWS::ElasticLoadBalancingV2::Listener"
    _OWN: Final = ("AlpnPolicy", "Certificates", "DefaultActions", "Port", "Protocol", "SslPolicy")
    properties = frozenset({*_OWN, "ListenerAttributes", "LoadBalancerArn", "Tags"})
    fixed = frozenset({"LoadBalancerArn"})

    def create(self, wanted: Properties, at: Site) -> Made:
        elb = at.client("elbv2")
        call = shaped(elb, "create_listener", _with_labels(wanted), but=frozenset({"ListenerAttributes"}))
        arn = elb.create_listener(**call)["Listeners"][0]["ListenerArn"]
        made = Made(arn, {"ListenerArn": arn}, _asked(wanted, "ListenerAttributes"))
        at.begin(made)
        self._set(elb, made.id, wanted)
        return made

    def _set(self, elb: Any, arn: str, wanted: Properties) -> None:
        if given := wanted.get("ListenerAttributes"):
            call = shaped(elb, "modify_listener_attributes", {"ListenerArn": arn, "Attributes": given})
            elb.modify_listener_attributes(**call)

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        elb = at.client("elbv2")
        own = {name: wanted[name] for name in self._OWN if name in wanted}
        elb.modify_listener(**shaped(elb, "modify_listener", {"ListenerArn": made.id, **own}))
        self._set(elb, made.id, wanted)
        _retag(elb, made.id, before, wanted)
        return Made(made.id, made.attributes, _asked(wanted, "ListenerAttributes"))

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("elbv2").delete_listener(ListenerArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        elb = at.client("elbv2")
        found = elb.describe_listeners(ListenerArns=[made.id])["Listeners"][0]
        wanted = elb.describe_listener_attributes(ListenerArn=made.id)["Attributes"]
        return {**found, "ListenerAttributes": _told(made, wanted), **_told_tags(elb, made.id)}


@provides
class ListenerRule(Provider):
    """Any change of it sets its actions, too, to what the template has: whoever shifts weights by the service's own
    calls loses them then, and must see to it that the resource's text does not change."""

    type = "AWS::ElasticLoadBalancingV2::ListenerRule"
    properties = frozenset({"Actions", "Conditions", "ListenerArn", "Priority", "Tags"})
    fixed = frozenset({"ListenerArn"})

    def create(self, wanted: Properties, at: Site) -> Made:
        elb = at.client("elbv2")
        arn = elb.create_rule(**shaped(elb, "create_rule", _with_labels(wanted)))["Rules"][0]["RuleArn"]
        return Made(arn, {"IsDefault": False, "RuleArn": arn}, kept={"ListenerArn": wanted["ListenerArn"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        elb = at.client("elbv2")
        own = {"RuleArn": made.id, "Actions": wanted["Actions"], "Conditions": wanted["Conditions"]}
        elb.modify_rule(**shaped(elb, "modify_rule", own))
        if before["Priority"] != wanted["Priority"]:
            place = {"RulePriorities": [{"RuleArn": made.id, "Priority": wanted["Priority"]}]}
            elb.set_rule_priorities(**shaped(elb, "set_rule_priorities", place))
        _retag(elb, made.id, before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("elbv2").delete_rule(RuleArn=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        elb = at.client("elbv2")
        found = elb.describe_rules(RuleArns=[made.id])["Rules"][0]
        return {**found, **made.kept, **_told_tags(elb, made.id)}
