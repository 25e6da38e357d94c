"""Networks: VPCs, subnets, gateways, addresses and routes."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from tests.localaws.formation.provider import PhysicalResource, Properties, Provider, Site, provides
from tests.localaws.formation.shapes import shaped, tags


def specified(kind: str, desired: Properties) -> dict[str, Any]:
    """The tag specifications of a new EC2 resource; EC2 refuses an empty list."""
    return {"TagSpecifications": [{"ResourceType": kind, "Tags": tags(desired)}]} if tags(desired) else {}


def retag(ec2: Any, id_: str, before: Properties, desired: Properties) -> None:
    if removed := [{"Key": tag["Key"]} for tag in tags(before) if tag not in tags(desired)]:
        ec2.delete_tags(Resources=[id_], Tags=removed)
    if tags(desired):
        ec2.create_tags(Resources=[id_], Tags=tags(desired))


class OfEc2(Provider):
    """An EC2 resource with one call each to create, delete and describe it by id; only its tags can change."""

    kind: ClassVar[str]  # the resource type in tag specifications
    id_: ClassVar[str]  # the member with the id
    verbs: ClassVar[tuple[str, str, str]]
    list_member: ClassVar[str]  # the list in the response of the describe call

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        ec2 = site.client("ec2")
        arguments = shaped(ec2, self.verbs[0], desired, exclude=frozenset({"Tags"}))
        result = getattr(ec2, self.verbs[0])(**arguments, **specified(self.kind, desired))
        return self.physical_resource(_inner(result, self.id_), site)

    def physical_resource(self, response: Mapping[str, Any], site: Site) -> PhysicalResource:
        return PhysicalResource(response[self.id_], {self.id_: response[self.id_]})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        retag(site.client("ec2"), resource.id, before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        getattr(site.client("ec2"), self.verbs[1])(**{self.id_: resource.id})

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        actual: dict[str, Any] = getattr(site.client("ec2"), self.verbs[2])(**{f"{self.id_}s": [resource.id]})[
            self.list_member
        ][0]
        return actual


def _inner(response: Mapping[str, Any], id_: str) -> Mapping[str, Any]:
    """The part of a response that has the id."""
    return (
        response
        if id_ in response
        else next(entry for entry in response.values() if isinstance(entry, Mapping) and id_ in entry)
    )


@provides
class Vpc(OfEc2):
    type = "AWS::EC2::VPC"
    kind, id_, list_member = "vpc", "VpcId", "Vpcs"
    verbs = ("create_vpc", "delete_vpc", "describe_vpcs")
    properties = frozenset({"CidrBlock", "EnableDnsHostnames", "EnableDnsSupport", "InstanceTenancy", "Tags"})
    fixed = frozenset({"CidrBlock", "InstanceTenancy"})
    _SWITCHES: Final = ("EnableDnsHostnames", "EnableDnsSupport")

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        plain = {name: value for name, value in desired.items() if name not in self._SWITCHES}
        resource = super().create(plain, site)
        site.begin(resource)
        self._switch(resource, desired, site)
        return resource

    def physical_resource(self, response: Mapping[str, Any], site: Site) -> PhysicalResource:
        ec2, id_ = site.client("ec2"), response["VpcId"]
        mine = [{"Name": "vpc-id", "Values": [id_]}]
        group = ec2.describe_security_groups(Filters=[*mine, {"Name": "group-name", "Values": ["default"]}])
        return PhysicalResource(
            id_,
            {
                "VpcId": id_,
                "CidrBlock": response["CidrBlock"],
                "CidrBlockAssociations": [
                    entry["AssociationId"] for entry in response.get("CidrBlockAssociationSet", ())
                ],
                "DefaultNetworkAcl": ec2.describe_network_acls(Filters=mine)["NetworkAcls"][0]["NetworkAclId"],
                "DefaultSecurityGroup": group["SecurityGroups"][0]["GroupId"],
            },
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        self._switch(resource, desired, site)
        return super().update(resource, before, desired, site)

    def _switch(self, resource: PhysicalResource, desired: Properties, site: Site) -> None:
        for name in self._SWITCHES:
            if name in desired:
                value = {"Value": str(desired[name]).lower() == "true"}
                site.client("ec2").modify_vpc_attribute(VpcId=resource.id, **{name: value})

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        ec2 = site.client("ec2")
        switches = {
            name: ec2.describe_vpc_attribute(VpcId=resource.id, Attribute=name[0].lower() + name[1:])[name]["Value"]
            for name in self._SWITCHES
        }
        return {**super().read(resource, site), **switches}


@provides
class Subnet(OfEc2):
    type = "AWS::EC2::Subnet"
    kind, id_, list_member = "subnet", "SubnetId", "Subnets"
    verbs = ("create_subnet", "delete_subnet", "describe_subnets")
    properties = frozenset({"AvailabilityZone", "CidrBlock", "MapPublicIpOnLaunch", "Tags", "VpcId"})
    fixed = frozenset({"AvailabilityZone", "CidrBlock", "VpcId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        resource = super().create(
            {name: value for name, value in desired.items() if name != "MapPublicIpOnLaunch"}, site
        )
        site.begin(resource)
        return self.update(resource, desired, desired, site)

    def physical_resource(self, response: Mapping[str, Any], site: Site) -> PhysicalResource:
        names = ("AvailabilityZone", "CidrBlock", "SubnetId", "VpcId")
        return PhysicalResource(response["SubnetId"], {name: response[name] for name in names} | {"Ipv6CidrBlocks": []})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        value = {"Value": str(desired.get("MapPublicIpOnLaunch", False)).lower() == "true"}
        site.client("ec2").modify_subnet_attribute(SubnetId=resource.id, MapPublicIpOnLaunch=value)
        return super().update(resource, before, desired, site)


@provides
class RouteTable(OfEc2):
    type = "AWS::EC2::RouteTable"
    kind, id_, list_member = "route-table", "RouteTableId", "RouteTables"
    verbs = ("create_route_table", "delete_route_table", "describe_route_tables")
    properties = frozenset({"Tags", "VpcId"})
    fixed = frozenset({"VpcId"})


@provides
class InternetGateway(OfEc2):
    type = "AWS::EC2::InternetGateway"
    kind, id_, list_member = "internet-gateway", "InternetGatewayId", "InternetGateways"
    verbs = ("create_internet_gateway", "delete_internet_gateway", "describe_internet_gateways")
    properties = frozenset({"Tags"})


@provides
class NatGateway(OfEc2):
    type = "AWS::EC2::NatGateway"
    kind, id_, list_member = "natgateway", "NatGatewayId", "NatGateways"
    verbs = ("create_nat_gateway", "delete_nat_gateway", "describe_nat_gateways")
    properties = frozenset({"AllocationId", "ConnectivityType", "SubnetId", "Tags"})
    fixed = frozenset({"AllocationId", "ConnectivityType", "SubnetId"})

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        actual = dict(super().read(resource, site))
        return {**actual, "AllocationId": actual["NatGatewayAddresses"][0]["AllocationId"]}


@provides
class Address(OfEc2):
    type = "AWS::EC2::EIP"
    kind, id_, list_member = "elastic-ip", "AllocationId", "Addresses"
    verbs = ("allocate_address", "release_address", "describe_addresses")
    properties = frozenset({"Domain", "Tags"})

    def physical_resource(self, response: Mapping[str, Any], site: Site) -> PhysicalResource:
        return PhysicalResource(
            response["PublicIp"], {"AllocationId": response["AllocationId"], "PublicIp": response["PublicIp"]}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        retag(site.client("ec2"), resource.attributes["AllocationId"], before, desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").release_address(AllocationId=resource.attributes["AllocationId"])

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        response = site.client("ec2").describe_addresses(AllocationIds=[resource.attributes["AllocationId"]])
        actual: dict[str, Any] = response["Addresses"][0]
        return actual


@provides
class GatewayAttachment(Provider):
    type = "AWS::EC2::VPCGatewayAttachment"
    properties = frozenset({"InternetGatewayId", "VpcId"})
    fixed = frozenset({"VpcId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        site.client("ec2").attach_internet_gateway(**desired)
        return PhysicalResource(f"IGW|{desired['VpcId']}", {"AttachmentType": "IGW"}, state=dict(desired))

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        """A VPC accepts one internet gateway at a time."""
        self.delete(resource, before, site)
        return self.create(desired, site)

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").detach_internet_gateway(**properties)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        id_ = resource.state["InternetGatewayId"]
        internet_gateway = site.client("ec2").describe_internet_gateways(InternetGatewayIds=[id_])["InternetGateways"][
            0
        ]
        return {"InternetGatewayId": id_, "VpcId": internet_gateway["Attachments"][0]["VpcId"]}


@provides
class Route(Provider):
    type = "AWS::EC2::Route"
    properties = frozenset({"DestinationCidrBlock", "GatewayId", "NatGatewayId", "RouteTableId"})
    fixed = frozenset({"DestinationCidrBlock", "RouteTableId"})

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        site.client("ec2").create_route(**desired)
        key = f"{desired['RouteTableId']}|{desired['DestinationCidrBlock']}"
        return PhysicalResource(
            key, {"CidrBlock": desired["DestinationCidrBlock"], "RouteTableId": desired["RouteTableId"]}
        )

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        site.client("ec2").replace_route(**desired)
        return resource

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        names = ("DestinationCidrBlock", "RouteTableId")
        site.client("ec2").delete_route(**{name: properties[name] for name in names})

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        table, block = resource.id.split("|")
        routes = site.client("ec2").describe_route_tables(RouteTableIds=[table])["RouteTables"][0]["Routes"]
        actual = next(route for route in routes if route.get("DestinationCidrBlock") == block)
        return {"RouteTableId": table, **actual}


@provides
class RouteTableAssociation(Provider):
    type = "AWS::EC2::SubnetRouteTableAssociation"
    properties = frozenset({"RouteTableId", "SubnetId"})
    fixed = frozenset({"SubnetId"})  # a new table replaces the association in one call

    def create(self, desired: Properties, site: Site) -> PhysicalResource:
        id_ = site.client("ec2").associate_route_table(**desired)["AssociationId"]
        return PhysicalResource(id_, {"Id": id_})

    def update(
        self, resource: PhysicalResource, before: Properties, desired: Properties, site: Site
    ) -> PhysicalResource:
        ec2 = site.client("ec2")
        association = ec2.replace_route_table_association(
            AssociationId=resource.id, RouteTableId=desired["RouteTableId"]
        )
        return PhysicalResource(association["NewAssociationId"], {"Id": association["NewAssociationId"]})

    def delete(self, resource: PhysicalResource, properties: Properties, site: Site) -> None:
        site.client("ec2").disassociate_route_table(AssociationId=resource.id)

    def read(self, resource: PhysicalResource, site: Site) -> Properties:
        desired = [{"Name": "association.route-table-association-id", "Values": [resource.id]}]
        associations = site.client("ec2").describe_route_tables(Filters=desired)["RouteTables"][0]["Associations"]
        actual: dict[str, Any] = next(
            entry for entry in associations if entry["RouteTableAssociationId"] == resource.id
        )
        return actual
