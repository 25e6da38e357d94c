"""Load balancers, listeners, rules and target groups."""

from typing import Any, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags

_NAME: Final = 32
_ON_LINKS: Final = "EnforceSecurityGroupInboundRulesOnPrivateLinkTraffic"


def _name(desired: Properties, site: Site) -> str:
    """A name without two hyphens in a row; names are short here."""
    name: str = desired.get("Name") or site.name(_NAME).replace("--", "-")
    return name


def _retag(elb: Any, arn: str, before: Properties, desired: Properties) -> None:
    current = {tag["Key"] for tag in tags(desired)}
    if removed := [tag["Key"] for tag in tags(before) if tag["Key"] not in current]:
        elb.remove_tags(ResourceArns=[arn], TagKeys=removed)
    if tags(desired):
        elb.add_tags(ResourceArns=[arn], Tags=tags(desired))


def _actual_tags(elb: Any, arn: str) -> dict[str, Any]:
    return {"Tags": elb.describe_tags(ResourceArns=[arn])["TagDescriptions"][0]["Tags"]}


def _attribute_keys(desired: Properties, name: str) -> dict[str, Any]:
    """The attributes that the template has: the service returns all that exist."""
    return {"keys": [entry["Key"] for entry in desired.get(name, [])]}


def _named_attributes(resource: PhysicalResource, attributes: list[Any]) -> list[Any]:
    return [attribute for attribute in attributes if attribute["Key"] in resource.state["keys"]]


def _with_labels(desired: Properties) -> dict[str, Any]:
    """The properties without an empty list of tags, which the service refuses."""
    return {name: value for name, value in desired.items() if name != "Tags" or value}


@provides
class LoadBalancer(Provider):
    type = "AWS::ElasticLoadBalancingV2::LoadBalancer"
    properties = frozenset(
        {
            _ON_LINKS,
            "IpAddressType",
            "LoadBalancerAttributes",
            "Name",
            "Scheme",
            "SecurityGroups",
            "Subnets",
            "Tags",
            "Type",
        }
    )
    fixed = frozenset({"Name", "Scheme", "Type"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        elb = site.client("elbv2")
        arguments = {"Scheme": "internet-facing", **_with_labels(desired), "Name": _name(desired, site)}
        separate = frozenset({_ON_LINKS, "LoadBalancerAttributes"})
        call = shaped(elb, "create_load_balancer", arguments, exclude=separate)
        load_balancer = elb.create_load_balancer(**call)["LoadBalancers"][0]
        resource = self._physical_resource(load_balancer, desired)
        site.begin(resource)
        if _ON_LINKS in desired:
            self._set_groups(elb, resource.id, desired)
        self._set(elb, resource, desired)
        return resource

    def _set_groups(self, elb: Any, arn: str, desired: Properties) -> None:
        own = {name: desired[name] for name in ("SecurityGroups", _ON_LINKS) if name in desired}
        elb.set_security_groups(LoadBalancerArn=arn, **own)

    def _physical_resource(self, description: Any, desired: Properties) -> PhysicalResource:
        arn = description["LoadBalancerArn"]
        return PhysicalResource(
            arn,
            {
                "CanonicalHostedZoneID": description["CanonicalHostedZoneId"],
                "DNSName": description["DNSName"],
                "LoadBalancerArn": arn,
                "LoadBalancerFullName": arn.split("loadbalancer/", 1)[1],
                "LoadBalancerName": description["LoadBalancerName"],
                "SecurityGroups": description.get("SecurityGroups", []),
            },
            _attribute_keys(desired, "LoadBalancerAttributes"),
        )

    def _set(self, elb: Any, resource: PhysicalResource, desired: Properties) -> None:
        if arguments := desired.get("LoadBalancerAttributes"):
            call = shaped(
                elb, "modify_load_balancer_attributes", {"LoadBalancerArn": resource.id, "Attributes": arguments}
            )
            elb.modify_load_balancer_attributes(**call)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        elb, arn = site.client("elbv2"), resource.id
        if any(before.get(name) != desired.get(name) for name in ("SecurityGroups", _ON_LINKS)):
            self._set_groups(elb, arn, desired)
        if before["Subnets"] != desired["Subnets"]:
            elb.set_subnets(LoadBalancerArn=arn, Subnets=desired["Subnets"])
        if before.get("IpAddressType") != desired.get("IpAddressType"):
            elb.set_ip_address_type(LoadBalancerArn=arn, IpAddressType=desired.get("IpAddressType", "ipv4"))
        self._set(elb, resource, desired)
        _retag(elb, arn, before, desired)
        return self._physical_resource(elb.describe_load_balancers(LoadBalancerArns=[arn])["LoadBalancers"][0], desired)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("elbv2").delete_load_balancer(LoadBalancerArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        elb = site.client("elbv2")
        load_balancer = elb.describe_load_balancers(LoadBalancerArns=[resource.id])["LoadBalancers"][0]
        desired = elb.describe_load_balancer_attributes(LoadBalancerArn=resource.id)["Attributes"]
        return {
            **load_balancer,
            "Name": load_balancer["LoadBalancerName"],
            "LoadBalancerAttributes": _named_attributes(resource, desired),
            "Subnets": [zone["SubnetId"] for zone in load_balancer["AvailabilityZones"]],
            **_actual_tags(elb, resource.id),
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

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        elb, separate = site.client("elbv2"), frozenset({"TargetGroupAttributes", "Targets"})
        arguments = {**_with_labels(desired), "Name": _name(desired, site)}
        target_group = elb.create_target_group(**shaped(elb, "create_target_group", arguments, exclude=separate))[
            "TargetGroups"
        ][0]
        resource = self._physical_resource(target_group, desired)
        site.begin(resource)
        if desired.get("HealthCheckEnabled") is not None:
            self._check(elb, resource.id, {"HealthCheckEnabled": desired["HealthCheckEnabled"]})
        self._set(elb, resource.id, {}, desired)
        return resource

    def _physical_resource(self, description: Any, desired: Properties) -> PhysicalResource:
        arn = description["TargetGroupArn"]
        return PhysicalResource(
            arn,
            {
                "LoadBalancerArns": description.get("LoadBalancerArns", []),
                "TargetGroupArn": arn,
                "TargetGroupFullName": arn.rsplit(":", 1)[1],
                "TargetGroupName": description["TargetGroupName"],
            },
            _attribute_keys(desired, "TargetGroupAttributes"),
        )

    def _check(self, elb: Any, arn: str, arguments: Properties) -> None:
        elb.modify_target_group(**shaped(elb, "modify_target_group", {"TargetGroupArn": arn, **arguments}))

    def _set(self, elb: Any, arn: str, before: Properties, desired: Properties) -> None:
        if arguments := desired.get("TargetGroupAttributes"):
            call = shaped(elb, "modify_target_group_attributes", {"TargetGroupArn": arn, "Attributes": arguments})
            elb.modify_target_group_attributes(**call)
        old, new = before.get("Targets", []), desired.get("Targets", [])
        if removed_tags := [entry for entry in old if entry not in new]:
            elb.deregister_targets(
                **shaped(elb, "deregister_targets", {"TargetGroupArn": arn, "Targets": removed_tags})
            )
        if come := [entry for entry in new if entry not in old]:
            elb.register_targets(**shaped(elb, "register_targets", {"TargetGroupArn": arn, "Targets": come}))

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        elb = site.client("elbv2")
        if arguments := {
            name: desired[name] for name in self._HEALTH if desired.get(name, ...) != before.get(name, ...)
        }:
            self._check(elb, resource.id, arguments)
        self._set(elb, resource.id, before, desired)
        _retag(elb, resource.id, before, desired)
        return self._physical_resource(
            elb.describe_target_groups(TargetGroupArns=[resource.id])["TargetGroups"][0], desired
        )

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("elbv2").delete_target_group(TargetGroupArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        elb = site.client("elbv2")
        target_group = elb.describe_target_groups(TargetGroupArns=[resource.id])["TargetGroups"][0]
        registered = elb.describe_target_health(TargetGroupArn=resource.id)["TargetHealthDescriptions"]
        desired = elb.describe_target_group_attributes(TargetGroupArn=resource.id)["Attributes"]
        return {
            **target_group,
            "Name": target_group["TargetGroupName"],
            "TargetGroupAttributes": _named_attributes(resource, desired),
            "Targets": [entry["Target"] for entry in registered],
            **_actual_tags(elb, resource.id),
        }


@provides
class Listener(Provider):
    type = "AWS::ElasticLoadBalancingV2::Listener"
    _OWN: Final = ("AlpnPolicy", "Certificates", "DefaultActions", "Port", "Protocol", "SslPolicy")
    properties = frozenset({*_OWN, "ListenerAttributes", "LoadBalancerArn", "Tags"})
    fixed = frozenset({"LoadBalancerArn"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        elb = site.client("elbv2")
        call = shaped(elb, "create_listener", _with_labels(desired), exclude=frozenset({"ListenerAttributes"}))
        arn = elb.create_listener(**call)["Listeners"][0]["ListenerArn"]
        resource = PhysicalResource(arn, {"ListenerArn": arn}, _attribute_keys(desired, "ListenerAttributes"))
        site.begin(resource)
        self._set(elb, resource.id, desired)
        return resource

    def _set(self, elb: Any, arn: str, desired: Properties) -> None:
        if arguments := desired.get("ListenerAttributes"):
            call = shaped(elb, "modify_listener_attributes", {"ListenerArn": arn, "Attributes": arguments})
            elb.modify_listener_attributes(**call)

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        elb = site.client("elbv2")
        own = {name: desired[name] for name in self._OWN if name in desired}
        elb.modify_listener(**shaped(elb, "modify_listener", {"ListenerArn": resource.id, **own}))
        self._set(elb, resource.id, desired)
        _retag(elb, resource.id, before, desired)
        return PhysicalResource(resource.id, resource.attributes, _attribute_keys(desired, "ListenerAttributes"))

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("elbv2").delete_listener(ListenerArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        elb = site.client("elbv2")
        actual = elb.describe_listeners(ListenerArns=[resource.id])["Listeners"][0]
        desired = elb.describe_listener_attributes(ListenerArn=resource.id)["Attributes"]
        return {**actual, "ListenerAttributes": _named_attributes(resource, desired), **_actual_tags(elb, resource.id)}


@provides
class ListenerRule(Provider):
    """A listener rule. Any change of it sets its actions, too, to those of the template: weights set by API calls are
    lost, so the resource's text must not change."""

    type = "AWS::ElasticLoadBalancingV2::ListenerRule"
    properties = frozenset({"Actions", "Conditions", "ListenerArn", "Priority", "Tags"})
    fixed = frozenset({"ListenerArn"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        elb = site.client("elbv2")
        arn = elb.create_rule(**shaped(elb, "create_rule", _with_labels(desired)))["Rules"][0]["RuleArn"]
        return PhysicalResource(
            arn, {"IsDefault": False, "RuleArn": arn}, state={"ListenerArn": desired["ListenerArn"]}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        elb = site.client("elbv2")
        own = {"RuleArn": resource.id, "Actions": desired["Actions"], "Conditions": desired["Conditions"]}
        elb.modify_rule(**shaped(elb, "modify_rule", own))
        if before["Priority"] != desired["Priority"]:
            place = {"RulePriorities": [{"RuleArn": resource.id, "Priority": desired["Priority"]}]}
            elb.set_rule_priorities(**shaped(elb, "set_rule_priorities", place))
        _retag(elb, resource.id, before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("elbv2").delete_rule(RuleArn=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        elb = site.client("elbv2")
        actual = elb.describe_rules(RuleArns=[resource.id])["Rules"][0]
        return {**actual, **resource.state, **_actual_tags(elb, resource.id)}
