"""Networks: what has addresses, and what leads from one to another."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.localaws.formation.provider import Made, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags


def specified(kind: str, wanted: Properties) -> dict[str, Any]:
    """The tags of a new thing of EC2, which refuses an empty list of them."""
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags(wanted)}]} if tags(wanted) else {}


def retag(ec2: Any, id_: str, before: Properties, wanted: Properties) -> None:
    if gone := [{"Key": tag["Key"]} for tag in tags(before) if tag not in tags(wanted)]:
        ec2.delete_tags(Resources=[id_], Tags=gone)
    if tags(wanted):
        ec2.create_tags(Resources=[id_], Tags=tags(wanted))


class OfEc2(Provider):
    """One call makes it, one removes it, one describes it, by an id; tags are all that can change."""

    kind: ClassVar[str]  # as in tag specifications
    id_: ClassVar[str]  # the member that holds the id
    verbs: ClassVar[tuple[str, str, str]]
    told: ClassVar[str]  # the list in the description

    def create(self, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        given = shaped(ec2, self.verbs[0], wanted, but=frozenset({"Tags"}))
        told = getattr(ec2, self.verbs[0])(**given, **specified(self.kind, wanted))
        return self.made(_inner(told, self.id_), at)

    def made(self, told: Mapping[str, Any], at: Site) -> Made:
        return Made(told[self.id_], {self.id_: told[self.id_]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        retag(at.client("ec2"), made.id, before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        getattr(at.client("ec2"), self.verbs[1])(**{self.id_: made.id})

    def read(self, made: Made, at: Site) -> Properties:
        found: dict[str, Any] = getattr(at.client("ec2"), self.verbs[2])(**{f"{self.id_}s": [made.id]})[self.told][0]
        return found


def _inner(told: Mapping[str, Any], id_: str) -> Mapping[str, Any]:
    """The part of an answer that has the id."""
    return told if id_ in told else next(each for each in told.values() if isinstance(each, Mapping) and id_ in each)


@provides
class Vpc(OfEc2):
    type = "AWS::EC2::VPC"
    kind, id_, told = "vpc", "VpcId", "Vpcs"
    verbs = ("create_vpc", "delete_vpc", "describe_vpcs")
    properties = frozenset({"CidrBlock", "EnableDnsHostnames", "EnableDnsSupport", "InstanceTenancy", "Tags"})
    fixed = frozenset({"CidrBlock", "InstanceTenancy"})
    _SWITCHES: Final = ("EnableDnsHostnames", "EnableDnsSupport")

    def create(self, wanted: Properties, at: Site) -> Made:
        plain = {name: value for name, value in wanted.items() if name not in self._SWITCHES}
        made = super().create(plain, at)
        at.begin(made)
        self._switch(made, wanted, at)
        return made

    def made(self, told: Mapping[str, Any], at: Site) -> Made:
        ec2, id_ = at.client("ec2"), told["VpcId"]
        mine = [{"Name": "vpc-id", "Values": [id_]}]
        group = ec2.describe_security_groups(Filters=[*mine, {"Name": "group-name", "Values": ["default"]}])
        return Made(
            id_,
            {
                "VpcId": id_,
                "CidrBlock": told["CidrBlock"],
                "CidrBlockAssociations": [one["AssociationId"] for one in told.get("CidrBlockAssociationSet", ())],
                "DefaultNetworkAcl": ec2.describe_network_acls(Filters=mine)["NetworkAcls"][0]["NetworkAclId"],
                "DefaultSecurityGroup": group["SecurityGroups"][0]["GroupId"],
            },
        )

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        self._switch(made, wanted, at)
        return super().update(made, before, wanted, at)

    def _switch(self, made: Made, wanted: Properties, at: Site) -> None:
        for name in self._SWITCHES:
            if name in wanted:
                value = {"Value": str(wanted[name]).lower() == "true"}
                at.client("ec2").modify_vpc_attribute(VpcId=made.id, **{name: value})

    def read(self, made: Made, at: Site) -> Properties:
        ec2 = at.client("ec2")
        switches = {
            name: ec2.describe_vpc_attribute(VpcId=made.id, Attribute=name[0].lower() + name[1:])[name]["Value"]
            for name in self._SWITCHES
        }
        return {**super().read(made, at), **switches}


@provides
class Subnet(OfEc2):
    type = "AWS::EC2::Subnet"
    kind, id_, told = "subnet", "SubnetId", "Subnets"
    verbs = ("create_subnet", "delete_subnet", "describe_subnets")
    properties = frozenset({"AvailabilityZone", "CidrBlock", "MapPublicIpOnLaunch", "Tags", "VpcId"})
    fixed = frozenset({"AvailabilityZone", "CidrBlock", "VpcId"})

    def create(self, wanted: Properties, at: Site) -> Made:
        made = super().create({name: each for name, each in wanted.items() if name != "MapPublicIpOnLaunch"}, at)
        at.begin(made)
        return self.update(made, wanted, wanted, at)

    def made(self, told: Mapping[str, Any], at: Site) -> Made:
        names = ("AvailabilityZone", "CidrBlock", "SubnetId", "VpcId")
        return Made(told["SubnetId"], {name: told[name] for name in names} | {"Ipv6CidrBlocks": []})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        value = {"Value": str(wanted.get("MapPublicIpOnLaunch", False)).lower() == "true"}
        at.client("ec2").modify_subnet_attribute(SubnetId=made.id, MapPublicIpOnLaunch=value)
        return super().update(made, before, wanted, at)


@provides
class RouteTable(OfEc2):
    type = "AWS::EC2::RouteTable"
    kind, id_, told = "route-table", "RouteTableId", "RouteTables"
    verbs = ("create_route_table", "delete_route_table", "describe_route_tables")
    properties = frozenset({"Tags", "VpcId"})
    fixed = frozenset({"VpcId"})


@provides
class InternetGateway(OfEc2):
    type = "AWS::EC2::InternetGateway"
    kind, id_, told = "internet-gateway", "InternetGatewayId", "InternetGateways"
    verbs = ("create_internet_gateway", "delete_internet_gateway", "describe_internet_gateways")
    properties = frozenset({"Tags"})


@provides
class NatGateway(OfEc2):
    type = "AWS::EC2::NatGateway"
    kind, id_, told = "natgateway", "NatGatewayId", "NatGateways"
    verbs = ("create_nat_gateway", "delete_nat_gateway", "describe_nat_gateways")
    properties = frozenset({"AllocationId", "ConnectivityType", "SubnetId", "Tags"})
    fixed = frozenset({"AllocationId", "ConnectivityType", "SubnetId"})

    def read(self, made: Made, at: Site) -> Properties:
        found = dict(super().read(made, at))
        return {**found, "AllocationId": found["NatGatewayAddresses"][0]["AllocationId"]}


@provides
class Address(OfEc2):
    type = "AWS::EC2::EIP"
    kind, id_, told = "elastic-ip", "AllocationId", "Addresses"
    verbs = ("allocate_address", "release_address", "describe_addresses")
    properties = frozenset({"Domain", "Tags"})

    def made(self, told: Mapping[str, Any], at: Site) -> Made:
        return Made(told["PublicIp"], {"AllocationId": told["AllocationId"], "PublicIp": told["PublicIp"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        retag(at.client("ec2"), made.attributes["AllocationId"], before, wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").release_address(AllocationId=made.attributes["AllocationId"])

    def read(self, made: Made, at: Site) -> Properties:
        told = at.client("ec2").describe_addresses(AllocationIds=[made.attributes["AllocationId"]])
        found: dict[str, Any] = told["Addresses"][0]
        return found


@provides
class GatewayAttachment(Provider):
    type = "AWS::EC2::VPCGatewayAttachment"
    properties = frozenset({"InternetGatewayId", "VpcId"})
    fixed = frozenset({"VpcId"})

    def create(self, wanted: Properties, at: Site) -> Made:
        at.client("ec2").attach_internet_gateway(**wanted)
        return Made(f"IGW|{wanted['VpcId']}", {"AttachmentType": "IGW"}, kept=dict(wanted))

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        """A VPC takes one internet gateway at a time."""
        self.delete(made, before, at)
        return self.create(wanted, at)

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").detach_internet_gateway(**properties)

    def read(self, made: Made, at: Site) -> Properties:
        id_ = made.kept["InternetGatewayId"]
        told = at.client("ec2").describe_internet_gateways(InternetGatewayIds=[id_])["InternetGateways"][0]
        return {"InternetGatewayId": id_, "VpcId": told["Attachments"][0]["VpcId"]}


@provides
class Route(Provider):
    type = "AWS::EC2::Route"
    properties = frozenset({"DestinationCidrBlock", "GatewayId", "NatGatewayId", "RouteTableId"})
    fixed = frozenset({"DestinationCidrBlock", "RouteTableId"})

    def create(self, wanted: Properties, at: Site) -> Made:
        at.client("ec2").create_route(**wanted)
        key = f"{wanted['RouteTableId']}|{wanted['DestinationCidrBlock']}"
        return Made(key, {"CidrBlock": wanted["DestinationCidrBlock"], "RouteTableId": wanted["RouteTableId"]})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        at.client("ec2").replace_route(**wanted)
        return made

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        names = ("DestinationCidrBlock", "RouteTableId")
        at.client("ec2").delete_route(**{name: properties[name] for name in names})

    def read(self, made: Made, at: Site) -> Properties:
        table, block = made.id.split("|")
        told = at.client("ec2").describe_route_tables(RouteTableIds=[table])["RouteTables"][0]["Routes"]
        found = next(route for route in told if route.get("DestinationCidrBlock") == block)
        return {"RouteTableId": table, **found}


@provides
class RouteTableAssociation(Provider):
    type = "AWS::EC2::SubnetRouteTableAssociation"
    properties = frozenset({"RouteTableId", "SubnetId"})
    fixed = frozenset({"SubnetId"})  # another table is another association, but without a moment of none

    def create(self, wanted: Properties, at: Site) -> Made:
        id_ = at.client("ec2").associate_route_table(**wanted)["AssociationId"]
        return Made(id_, {"Id": id_})

    def update(self, made: Made, before: Properties, wanted: Properties, at: Site) -> Made:
        ec2 = at.client("ec2")
        told = ec2.replace_route_table_association(AssociationId=made.id, RouteTableId=wanted["RouteTableId"])
        return Made(told["NewAssociationId"], {"Id": told["NewAssociationId"]})

    def delete(self, made: Made, properties: Properties, at: Site) -> None:
        at.client("ec2").disassociate_route_table(AssociationId=made.id)

    def read(self, made: Made, at: Site) -> Properties:
        wanted = [{"Name": "association.route-table-association-id", "Values": [made.id]}]
        told = at.client("ec2").describe_route_tables(Filters=wanted)["RouteTables"][0]["Associations"]
        found: dict[str, Any] = next(one for one in told if one["RouteTableAssociationId"] == made.id)
        return found
