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
    for service in all_.of("AWS::EC2::VPCEndpointServicePermissions"):
        if "*" in listed(service.properties.get("AllowedPrincipals")):
            what = "each AWS account may create an endpoint of the service"
            yield Finding(OPEN, service, "AllowedPrincipals", what, "list the accounts, roles or users")
    for cluster in all_.of("AWS::EKS::Cluster"):
        access = settings(cluster.properties, "ResourcesVpcConfig")
        callers = listed(access.get("PublicAccessCidrs", list(_WORLD)))
        if is_true(access.get("EndpointPublicAccess", True)) and set(map(str, callers)) & set(_WORLD):
            what = "the cluster's API server is open to the internet"
            remedy = "set EndpointPublicAccess to false, or list the callers in PublicAccessCidrs"
            yield Finding(OPEN, cluster, "ResourcesVpcConfig", what, remedy)


def _groups(all_: Templates) -> Iterator[Finding]:
    remedy = "name a security group, or the addresses that may call"
    for group in all_.of("AWS::EC2::SecurityGroup"):
        for index, rule in enumerate(tables(group.properties, "SecurityGroupIngress")):
            if _is_world_open(rule):
                yield Finding(
                    OPEN, group, f"SecurityGroupIngress/{index}", f"{_ports(rule)} is open to the internet", remedy
                )
    for separate in all_.of("AWS::EC2::SecurityGroupIngress"):
        if _is_world_open(separate.properties):
            yield Finding(OPEN, separate, "CidrIp", f"{_ports(separate.properties)} is open to the internet", remedy)


def _is_world_open(rule: Properties) -> bool:
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
            what = "instances in the subnet get public addresses"
            yield Finding(OPEN, subnet, "MapPublicIpOnLaunch", what, "set it to false")


def nothing_plain(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for listener in all_.of("AWS::ElasticLoadBalancingV2::Listener"):
        if listener.properties.get("Protocol") == "HTTP" and not _redirects_to_https(listener.properties):
            what = "the listener uses HTTP without TLS"
            yield Finding(PLAIN, listener, "Protocol", what, "give the fleet a `certificate`")


def _redirects_to_https(listener: Properties) -> bool:
    """True for a listener whose only action is a redirect to HTTPS."""
    actions = tables(listener, "DefaultActions")
    return bool(actions) and all(settings(action, "RedirectConfig").get("Protocol") == "HTTPS" for action in actions)


LAYOUT = "NXP-EFA-1"
GROUPS = "NXP-EFA-2"
SELF = "NXP-EFA-3"
SUBNET = "NXP-EFA-4"
BATCH_GROUPS = "NXP-BATCH-1"

_INTERFACES = "NetworkInterfaces"


def layout(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        place = f"{launch.inside}{_INTERFACES}"
        for what, remedy in _faults_of_layout(launch):
            yield Finding(LAYOUT, launch.resource, place, what, remedy)


def _faults_of_layout(launch: Launch) -> Iterator[tuple[str, str]]:
    rows = {name: INSTANCES[name].efa_interfaces for name in launch.types if name in INSTANCES}
    if not launch.efa:
        for name, count in rows.items():
            if count and _has_placement_group(launch):
                yield (
                    f"{name} instances in a placement group have no EFA interface, so collectives use TCP",
                    f"list its {count} interfaces of type efa",
                )
        return
    cards = [_number(interface, "NetworkCardIndex") for interface in launch.interfaces]
    for name, count in rows.items():
        if not count:
            yield f"{name} has no Elastic Fabric Adapter", "leave the interface type out, or use another instance type"
        elif sorted(cards) != list(range(count)):
            yield (
                f"{name} has network cards 0 to {count - 1}, but the interfaces are on cards {_series(cards)}",
                f"list one interface for each of the {count} cards",
            )
    yield from _faults_of_interfaces(list(zip(cards, launch.interfaces, strict=True)))
    if len(cards) > 1 and any(is_true(interface.get("AssociatePublicIpAddress")) for interface in launch.interfaces):
        yield (
            "EC2 gives no public address to an instance with several interfaces",
            "leave AssociatePublicIpAddress out; for internet access use a NAT gateway",
        )


def _faults_of_interfaces(cards: list[tuple[int, Properties]]) -> Iterator[tuple[str, str]]:
    """Faults of interfaces, grouped by fault."""
    device: dict[tuple[int, int], list[int]] = {}
    kind: dict[tuple[str, str], list[int]] = {}
    for card, interface in cards:
        index, type_ = _number(interface, "DeviceIndex"), str(interface.get("InterfaceType", "interface"))
        if index != min(card, 1):
            device.setdefault((index, min(card, 1)), []).append(card)
        if type_ != "efa" and (card == 0 or type_ != "efa-only"):
            kind.setdefault((type_, "efa" if card == 0 else "efa or efa-only"), []).append(card)
    for (index, expected), wrong in device.items():
        what = f"the interface on {_cards(wrong)} has device index {index}"
        yield what, f"it must be {expected}: 0 on card 0, 1 on all others"
    for (type_, right), wrong in kind.items():
        yield f"the interface on {_cards(wrong)} is of type {type_}", f"make it {right}: card 0 carries the IP address"


def _has_placement_group(launch: Launch) -> bool:
    return "Placement" in launch.data or any("PlacementGroup" in compute(user) for user in launch.users)


def _number(interface: Properties, key: str) -> int:
    """An index, as a number or as text; 0 if missing, -1 if invalid."""
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
                "security groups are listed outside of the interfaces, which EC2 rejects",
                "move them into each interface's Groups",
            )
        for index, interface in enumerate(launch.interfaces):
            place = f"LaunchTemplateData/{_INTERFACES}/{index}"
            if not interface.get("Groups"):
                what = "an interface has no security group, so it gets the VPC's default group"
                yield Finding(GROUPS, launch.resource, place, what, "list the EFA group in its Groups")
            if "SubnetId" in interface:
                what = "an interface names a subnet, but its Auto Scaling group, Batch or EKS chooses the subnet"
                yield Finding(GROUPS, launch.resource, place, what, "leave SubnetId out")


def talks_to_itself(all_: Templates, facts: Facts) -> Iterator[Finding]:
    checked: set[tuple[str, str]] = set()
    for launch in launches(all_):
        for interface in launch.interfaces if launch.efa else ():
            groups = [all_.follow(group, launch.resource) for group in listed(interface.get("Groups"))]
            own = [group for group in groups if group is not None and group.type == "AWS::EC2::SecurityGroup"]
            if len(own) < len(groups) or not own or any(group.key in checked for group in own):
                continue  # a group of another stack may have the rules
            checked.update(group.key for group in own)
            missing = [
                direction
                for direction in ("ingress", "egress")
                if not any(_allows_itself(all_, g, direction) for g in own)
            ]
            for direction in missing:
                yield Finding(
                    SELF,
                    own[0],
                    "SecurityGroupIngress" if direction == "ingress" else "SecurityGroupEgress",
                    f"EFA interfaces use the group, but it has no {direction} rule for all traffic from and to itself",
                    f"add an {direction} rule of protocol -1 that names the group; an address range is not enough",
                )


def _allows_itself(all_: Templates, group: Resource, direction: str) -> bool:
    kind, peer = (
        ("Ingress", "SourceSecurityGroupId") if direction == "ingress" else ("Egress", "DestinationSecurityGroupId")
    )
    inline = [(rule, group) for rule in tables(group.properties, f"SecurityGroup{kind}")]
    separate = [
        (rule.properties, rule)
        for rule in all_.of(f"AWS::EC2::SecurityGroup{kind}")
        if _is(all_, rule.properties.get("GroupId"), rule, group)
    ]
    return any(
        str(rule.get("IpProtocol")) == "-1" and _is(all_, rule.get(peer), at, group) for rule, at in inline + separate
    )


def _is(all_: Templates, value: Any, at: Resource, expected: Resource) -> bool:
    target = all_.follow(value, at)
    return target is not None and target.key == expected.key


def one_subnet(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for user in launch.users if launch.efa else ():
            place, subnet_list = subnets(user)
            if subnet_list is not None and len(subnet_list) != 1:
                yield Finding(
                    SUBNET,
                    user,
                    place,
                    f"its instances communicate by EFA, but it starts them in {len(subnet_list)} subnets",
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
                    "its launch template has interfaces with security groups, and Batch rejects both together",
                    "leave SecurityGroupIds of the environment out",
                )


ENDPOINT: Final = "NXP-NET-2"

_INTERNET_ACCESS: Final = ("AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::TransitGatewayAttachment")


def reachable(all_: Templates, facts: Facts) -> Iterator[Finding]:
    network = next(all_.of("AWS::EC2::VPC"), None)
    if network is None or any(all_.of(*_INTERNET_ACCESS)):
        return  # an existing network, or one with internet access
    endpoints = {_service(endpoint): endpoint for endpoint in all_.of("AWS::EC2::VPCEndpoint")}
    all_needs: set[Need] = set()
    for template in all_.all:
        try:
            required = sorted(needs(template.stack, template.document["Resources"]))
        except Unreachable as unreachable:
            what, _, remedy = str(unreachable).rpartition("; ")
            yield Finding(ENDPOINT, network, "", what, remedy)
            continue
        all_needs.update(required)
        for need in required:
            if need.endpoint not in endpoints:
                caller = template.resources[need.caller.partition("/")[2]]
                what = f"it calls {need.endpoint} ({need.call}), for which the closed network has no endpoint"
                yield Finding(ENDPOINT, caller, "", what, f"add an endpoint for {need.endpoint}")
    for service in unused_endpoints(all_needs, endpoints):
        what = f"nothing in the network calls {service}"
        yield Finding(
            ENDPOINT, endpoints[service], "ServiceName", what, "leave the endpoint out: it is billed by the hour"
        )


def _service(endpoint: Resource) -> str:
    """The service name without the region: com.amazonaws.us-east-2.ecr.api -> ecr.api."""
    name = text(endpoint.properties.get("ServiceName"))
    return name.partition("com.amazonaws.")[2].partition(".")[2] or name
