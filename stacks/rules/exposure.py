"""Rules about who reaches what: nothing is open to the world, and nothing answers in plain text."""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.reading.launches import launches
from nxpipe.stacks.reading.template import Properties, Templates, is_true, listed, settings, tables
from nxpipe.stacks.rules.finding import Facts, Finding

OPEN = "NXP-NET-1"
PLAIN = "NXP-NET-3"

_WORLD: Final = ("0.0.0.0/0", "::/0")


def nothing_open(all_: Templates, facts: Facts) -> Iterator[Finding]:
    yield from _groups(all_)
    yield from _public_addresses(all_)
    for balancer in all_.of("AWS::ElasticLoadBalancingV2::LoadBalancer"):
        if balancer.properties.get("Scheme", "internet-facing") != "internal":
            what = "the load balancer has public addresses"
            yield Finding(OPEN, balancer, "Scheme", what, "set Scheme to internal")
    for cluster in all_.of("AWS::EKS::Cluster"):
        access = settings(cluster.properties, "ResourcesVpcConfig")
        callers = listed(access.get("PublicAccessCidrs", list(_WORLD)))
        if is_true(access.get("EndpointPublicAccess", True)) and set(map(str, callers)) & set(_WORLD):
            what = "the world reaches the cluster's API server"
            mend = "set EndpointPublicAccess to false, or list the callers in PublicAccessCidrs"
            yield Finding(OPEN, cluster, "ResourcesVpcConfig", what, mend)


def _groups(all_: Templates) -> Iterator[Finding]:
    mend = "name a security group, or the addresses that may call"
    for group in all_.of("AWS::EC2::SecurityGroup"):
        for index, rule in enumerate(tables(group.properties, "SecurityGroupIngress")):
            if _to_the_world(rule):
                yield Finding(OPEN, group, f"SecurityGroupIngress/{index}", f"the world may reach {_ports(rule)}", mend)
    for beside in all_.of("AWS::EC2::SecurityGroupIngress"):
        if _to_the_world(beside.properties):
            yield Finding(OPEN, beside, "CidrIp", f"the world may reach {_ports(beside.properties)}", mend)


def _to_the_world(rule: Properties) -> bool:
    return rule.get("CidrIp") in _WORLD or rule.get("CidrIpv6") in _WORLD


def _ports(rule: Properties) -> str:
    if str(rule.get("IpProtocol")) == "-1" or "FromPort" not in rule:
        return "every port"
    first, last = rule["FromPort"], rule.get("ToPort", rule["FromPort"])
    return f"port {first}" if first == last else f"ports {first} to {last}"


def _public_addresses(all_: Templates) -> Iterator[Finding]:
    for launch in launches(all_):
        for index, interface in enumerate(launch.interfaces):
            if is_true(interface.get("AssociatePublicIpAddress")):
                place = f"{launch.inside}NetworkInterfaces/{index}"
                yield Finding(OPEN, launch.resource, place, "instances get public addresses", "leave them out")
    for subnet in all_.of("AWS::EC2::Subnet"):
        if is_true(subnet.properties.get("MapPublicIpOnLaunch")):
            what = "whatever starts in the subnet gets a public address"
            yield Finding(OPEN, subnet, "MapPublicIpOnLaunch", what, "set it to false")


def nothing_plain(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for listener in all_.of("AWS::ElasticLoadBalancingV2::Listener"):
        if listener.properties.get("Protocol") == "HTTP" and not _sends_on(listener.properties):
            what = "requests and answers go in plain text"
            yield Finding(PLAIN, listener, "Protocol", what, "give the fleet a `certificate`")


def _sends_on(listener: Properties) -> bool:
    """A listener that only tells callers to come back by HTTPS serves nothing."""
    actions = tables(listener, "DefaultActions")
    return bool(actions) and all(settings(each, "RedirectConfig").get("Protocol") == "HTTPS" for each in actions)
