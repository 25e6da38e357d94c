"""Lint rules about the network: public exposure, TLS, EFA interfaces, VPC endpoints of closed networks."""

from collections.abc import Iterator
from typing import Any, Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.stacks.lint.egress import Need, Unreachable, needs, unused_endpoints
from nxpipe.stacks.lint.finding import Facts, Finding
from nxpipe.stacks.lint.launches import BATCH, TEMPLATE, Launch, compute, launches, subnets
from nxpipe.stacks.lint.template import Properties, Resource, Templates, is_true, listed, settings, tables, text

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


LAYOUT = "NXP-EFA-1"
GROUPS = "NXP-EFA-2"
SELF = "NXP-EFA-3"
SUBNET = "NXP-EFA-4"
BATCH_GROUPS = "NXP-BATCH-1"

_INTERFACES = "NetworkInterfaces"


def layout(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        place = f"{launch.inside}{_INTERFACES}"
        for what, mend in _faults_of_layout(launch):
            yield Finding(LAYOUT, launch.resource, place, what, mend)


def _faults_of_layout(launch: Launch) -> Iterator[tuple[str, str]]:
    rows = {name: INSTANCES[name].efa_interfaces for name in launch.types if name in INSTANCES}
    if not launch.efa:
        for name, count in rows.items():
            if count and _close_together(launch):
                yield (
                    f"{name} instances that are placed together have no EFA interface, so collectives go by TCP",
                    f"list its {count} interfaces of type efa",
                )
        return
    cards = [_number(each, "NetworkCardIndex") for each in launch.interfaces]
    for name, count in rows.items():
        if not count:
            yield f"{name} has no Elastic Fabric Adapter", "leave the interface type out, or take another instance type"
        elif sorted(cards) != list(range(count)):
            yield (
                f"{name} has network cards 0 to {count - 1}, and the interfaces are on cards {_series(cards)}",
                f"list one interface for each of the {count} cards",
            )
    yield from _faults_of_interfaces(list(zip(cards, launch.interfaces, strict=True)))
    if len(cards) > 1 and any(is_true(each.get("AssociatePublicIpAddress")) for each in launch.interfaces):
        yield (
            "EC2 gives no public address to an instance with several interfaces",
            "leave AssociatePublicIpAddress out; a NAT gateway is the way out",
        )


def _faults_of_interfaces(cards: list[tuple[int, Properties]]) -> Iterator[tuple[str, str]]:
    """One sentence for all cards that have the same fault."""
    device: dict[tuple[int, int], list[int]] = {}
    kind: dict[tuple[str, str], list[int]] = {}
    for card, interface in cards:
        index, type_ = _number(interface, "DeviceIndex"), str(interface.get("InterfaceType", "interface"))
        if index != min(card, 1):
            device.setdefault((index, min(card, 1)), []).append(card)
        if type_ != "efa" and (card == 0 or type_ != "efa-only"):
            kind.setdefault((type_, "efa" if card == 0 else "efa or efa-only"), []).append(card)
    for (index, wanted), wrong in device.items():
        what = f"the interface on {_cards(wrong)} has device index {index}"
        yield what, f"it must be {wanted}: 0 on card 0, 1 on all others"
    for (type_, right), wrong in kind.items():
        yield f"the interface on {_cards(wrong)} is of type {type_}", f"make it {right}: card 0 carries the IP address"


def _close_together(launch: Launch) -> bool:
    return "Placement" in launch.data or any("PlacementGroup" in compute(user) for user in launch.users)


def _number(interface: Properties, key: str) -> int:
    """Indices are numbers, or text in templates that people write; a missing one is 0."""
    value = interface.get(key, 0)
    return int(value) if isinstance(value, int) or str(value).isdigit() else -1


def _cards(cards: list[int]) -> str:
    return f"card {cards[0]}" if len(cards) == 1 else f"each of the cards {_series(cards)}"


def _series(cards: list[int]) -> str:
    return ", ".join(map(str, sorted(cards)))


def groups_inside(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        if not launch.efa or launch.resource.type != TEMPLATE:
            continue
        if listed(launch.data.get("SecurityGroupIds")) or listed(launch.data.get("SecurityGroups")):
            yield Finding(
                GROUPS,
                launch.resource,
                "LaunchTemplateData/SecurityGroupIds",
                "security groups stand beside the interfaces, where EC2 refuses them",
                "move them into each interface's Groups",
            )
        for index, interface in enumerate(launch.interfaces):
            place = f"LaunchTemplateData/{_INTERFACES}/{index}"
            if not interface.get("Groups"):
                what = "an interface has no security group of its own, and so the VPC's default one"
                yield Finding(GROUPS, launch.resource, place, what, "list the EFA group in its Groups")
            if "SubnetId" in interface:
                what = "an interface names a subnet, which its Auto Scaling group, Batch or EKS decides"
                yield Finding(GROUPS, launch.resource, place, what, "leave SubnetId out")


def talks_to_itself(all_: Templates, facts: Facts) -> Iterator[Finding]:
    checked: set[tuple[str, str]] = set()
    for launch in launches(all_):
        for interface in launch.interfaces if launch.efa else ():
            found = [all_.follow(each, launch.resource) for each in listed(interface.get("Groups"))]
            own = [each for each in found if each is not None and each.type == "AWS::EC2::SecurityGroup"]
            if len(own) < len(found) or not own or any(each.key in checked for each in own):
                continue  # a group from elsewhere may be the one
            checked.update(each.key for each in own)
            missing = [way for way in ("ingress", "egress") if not any(_allows_itself(all_, g, way) for g in own)]
            for way in missing:
                yield Finding(
                    SELF,
                    own[0],
                    "SecurityGroupIngress" if way == "ingress" else "SecurityGroupEgress",
                    f"EFA interfaces use the group, and it has no {way} of all traffic from and to itself",
                    f"add an {way} rule of protocol -1 that names the group; one by addresses does not do",
                )


def _allows_itself(all_: Templates, group: Resource, way: str) -> bool:
    kind, peer = ("Ingress", "SourceSecurityGroupId") if way == "ingress" else ("Egress", "DestinationSecurityGroupId")
    inline = [(rule, group) for rule in tables(group.properties, f"SecurityGroup{kind}")]
    beside = [
        (rule.properties, rule)
        for rule in all_.of(f"AWS::EC2::SecurityGroup{kind}")
        if _is(all_, rule.properties.get("GroupId"), rule, group)
    ]
    return any(
        str(rule.get("IpProtocol")) == "-1" and _is(all_, rule.get(peer), at, group) for rule, at in inline + beside
    )


def _is(all_: Templates, value: Any, at: Resource, wanted: Resource) -> bool:
    found = all_.follow(value, at)
    return found is not None and found.key == wanted.key


def one_subnet(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for user in launch.users if launch.efa else ():
            place, where = subnets(user)
            if where is not None and len(where) != 1:
                yield Finding(
                    SUBNET,
                    user,
                    place,
                    f"its instances talk by EFA, and it starts them in {len(where)} subnets",
                    "name one subnet: EFA traffic does not leave it",
                )


def batch_groups(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for user in launch.users:
            if user.type == BATCH and launch.interfaces and compute(user).get("SecurityGroupIds"):
                yield Finding(
                    BATCH_GROUPS,
                    user,
                    "ComputeResources/SecurityGroupIds",
                    "its launch template has interfaces with groups of their own, and Batch refuses both",
                    "leave SecurityGroupIds of the environment out",
                )


ENDPOINT: Final = "NXP-NET-2"

_WAYS_OUT: Final = ("AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::TransitGatewayAttachment")


def reachable(all_: Templates, facts: Facts) -> Iterator[Finding]:
    network = next(all_.of("AWS::EC2::VPC"), None)
    if network is None or any(all_.of(*_WAYS_OUT)):
        return  # a network that exists already, or that has a way out
    there = {_service(each): each for each in all_.of("AWS::EC2::VPCEndpoint")}
    wanted: set[Need] = set()
    for template in all_.all:
        try:
            found = sorted(needs(template.stack, template.document["Resources"]))
        except Unreachable as unreachable:
            what, _, mend = str(unreachable).rpartition("; ")
            yield Finding(ENDPOINT, network, "", what, mend)
            continue
        wanted.update(found)
        for need in found:
            if need.endpoint not in there:
                caller = template.resources[need.caller.partition("/")[2]]
                what = f"it calls {need.endpoint} ({need.call}), to which nothing leads out of the closed network"
                yield Finding(ENDPOINT, caller, "", what, f"add an endpoint for {need.endpoint}")
    for service in unused_endpoints(wanted, there):
        what = f"nothing in the network calls {service}"
        yield Finding(
            ENDPOINT, there[service], "ServiceName", what, "leave the endpoint out: it costs money by the hour"
        )


def _service(endpoint: Resource) -> str:
    """com.amazonaws.us-east-2.ecr.api -> ecr.api, whatever the region."""
    name = text(endpoint.properties.get("ServiceName"))
    return name.partition("com.amazonaws.")[2].partition(".")[2] or name
